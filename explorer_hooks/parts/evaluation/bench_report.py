"""What `explorer bench` prints: a table for each set, or JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from explorer_hooks.parts.evaluation.bench import BASE, BenchStep, Line
from syncd.errors import plain
from syncd.jobfile.evaluation import EvaluationSet
from syncd.protocol.version import label_of

SCHEMA = 1  # the `schema_version` of the JSON document; docs/evaluation.md describes it

_OWN = ("generation", "step", "set", "key", "digest", "bench", "at")


def document(job: str, steps: Sequence[BenchStep]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "job": job,
        "steps": [
            {
                "step": step.step,
                "state": step.state,
                "reason": step.reason,
                "sets": [
                    {**dict(line), "set": name, "was_known": name in step.recorded}
                    for name, line in step.lines.items()
                ],
            }
            for step in steps
        ],
    }


def tables(steps: Sequence[BenchStep], sets: dict[str, EvaluationSet]) -> Iterator[str]:
    for name, section in sets.items():
        rows = [(step, step.lines[name]) for step in steps if name in step.lines]
        if rows:
            yield _title(name, section)
            yield from _table(name, rows)
            yield ""
    for step in steps:
        if step.state != "measured":
            yield plain(f"step {step.step} was not measured, {step.state}: {step.reason}")


def _title(name: str, section: EvaluationSet) -> str:
    count = f"{section.samples} response{'s' if section.samples > 1 else ''} to each task"
    return f"{name or '[explorer.evaluation]'}: {count} at temperature {section.temperature:g}"


def _table(name: str, rows: Sequence[tuple[BenchStep, Line]]) -> Iterator[str]:
    """Yield the lines of a table, its columns aligned at the right; a star marks what was measured before."""
    figures = list(dict.fromkeys(figure for _, line in rows for figure in line if figure not in _OWN))
    cells = [["step", "version", *figures]]
    for measured, line in rows:
        step = "base" if measured.step == BASE else str(measured.step)
        version = "" if measured.step == BASE else label_of((line["generation"], line["step"]))
        mark = "*" if name in measured.recorded else ""
        cells.append([f"{step}{mark}", version, *(_shown(line.get(figure)) for figure in figures)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    if any(name in measured.recorded for measured, _ in rows):
        yield "  * measured before; --again measures it once more"


def _shown(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"  # noqa: PLR2004 - four digits and more
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
