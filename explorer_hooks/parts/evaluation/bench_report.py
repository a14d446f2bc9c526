"""What `explorer bench` prints: a table for each set, or JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from explorer_hooks.parts.evaluation.bench import BASE, BenchStep, Line
from syncd.errors import plain
from syncd.jobfile.evaluation import EvaluationSet
from syncd.protocol.version import label_of

SCHEMA = 1
"""The `schema_version` of the JSON document; docs/evaluation.md describes it."""

_OWN = ("generation", "step", "set", "key", "digest", "bench", "at")


def document(job: str, steps: Sequence[BenchStep]) -> dict[str, Any]:
    """Return what was found as plain JSON."""
    return {
        "schema_version": SCHEMA,
        "job": job,
        "steps": [
            {
                "step": one.step,
                "state": one.state,
                "reason": one.reason,
                "sets": [
                    {**dict(line), "set": name, "was_known": name in one.known}
                    for name, line in one.lines.items()
                ],
            }
            for one in steps
        ],
    }


def tables(steps: Sequence[BenchStep], sets: dict[str, EvaluationSet]) -> Iterator[str]:
    """Yield the lines of the tables, then a line for each step that was not measured."""
    for name, section in sets.items():
        rows = [(one, one.lines[name]) for one in steps if name in one.lines]
        if rows:
            yield _title(name, section)
            yield from _table(name, rows)
            yield ""
    for one in steps:
        if one.state != "measured":
            yield plain(f"step {one.step} was not measured, {one.state}: {one.reason}")


def _title(name: str, section: EvaluationSet) -> str:
    count = f"{section.samples} response{'s' if section.samples > 1 else ''} to each task"
    return f"{name or '[explorer.evaluation]'}: {count} at temperature {section.temperature:g}"


def _table(name: str, rows: Sequence[tuple[BenchStep, Line]]) -> Iterator[str]:
    """Yield the lines of a table, its columns aligned at the right; a star marks what was measured before."""
    figures = list(dict.fromkeys(figure for _, line in rows for figure in line if figure not in _OWN))
    cells = [["step", "version", *figures]]
    for one, line in rows:
        step = "base" if one.step == BASE else str(one.step)
        version = "" if one.step == BASE else label_of((line["generation"], line["step"]))
        mark = "*" if name in one.known else ""
        cells.append([f"{step}{mark}", version, *(_shown(line.get(figure)) for figure in figures)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    if any(name in one.known for one, _ in rows):
        yield "  * measured before; --again measures it once more"


def _shown(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"  # noqa: PLR2004 - four digits and more
    return "-" if value is None else f"{value:g}" if isinstance(value, float | int) else str(value)
