"""The tables of docs/metrics.md: the daemon's metrics as Prometheus has them, and the figures of a training."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncd.figures import Panel

_TRAINING = Path(__file__).with_name("training_metrics.toml")

_FAMILIES = {
    "evaluation": "`eval/reward`, `eval/pass_at_K`, `eval/best_at_K`, and the same of each set, `eval/NAME/...`",
    "latency": "`latency` of `version_published`",
    "saved": "the sum of `whole_bytes` - `changes_bytes` of `version_published`",
    "engines": "`explorer_joined`, `explorer_left`, `explorer_died` and `engine_state_changed`",
}
"""What charts show whose curves are not the names of metrics."""


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    daemon = "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *_daemon()])
    return {"daemon": daemon, "panels": _panels(), **dict(_training())}


def _daemon() -> Iterator[str]:
    from syncd.observe.metric_table import described  # noqa: PLC0415 - found once `sys.path` has this checkout

    for name, kind, labels, about in described():
        yield f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {about} |"


def _training() -> Iterator[tuple[str, str]]:
    """Yield the table of each group of training figures by the group's name."""
    groups = tomllib.loads(_TRAINING.read_text())
    _check_complete({name for figures in groups.values() for names in figures for name in names.split()})
    for group, figures in groups.items():
        rows = [f"| {_code(names)} | {about} |" for names, about in figures.items()]
        yield group, "\n".join(["| metric | meaning |", "|---|---|", *rows])


def _check_complete(described: set[str]) -> None:
    from trainer.config.known_figures import KNOWN  # noqa: PLC0415

    assert described >= KNOWN, f"{_TRAINING.name} has no {', '.join(sorted(KNOWN - described))}"


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _panels() -> str:
    """Return the charts of page and plot, in their order."""
    charts = resolve_name("syncd.parts.page.chart_table:CHARTS")  # a part, which a tree may be without
    rows = [f"| {chart.title} | {chart.unit} | {_shown(chart)} | {chart.source} |" for chart in charts]
    return "\n".join(["| chart | unit | what it shows | file |", "|---|---|---|---|", *rows])


def _shown(chart: "Panel") -> str:
    """Return the metrics of a chart; of a family the pattern's groups become NAME."""
    if chart.name in _FAMILIES:
        return _FAMILIES[chart.name]
    if chart.family is not None:
        return f"each `{re.sub(r'[(].*?[)]', 'NAME', chart.family.pattern)}`"
    return ", ".join(f"`{name}`" for curve in chart.curves for name in curve.names)
