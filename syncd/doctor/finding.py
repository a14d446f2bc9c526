"""What a probe says: a finding, and the verdict of many."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["ok", "warn", "fail", "skip"]

Figures = Mapping[str, float]

_GRAVITY: tuple[Verdict, ...] = ("fail", "warn")


class Answer(NamedTuple):
    """What the body of a probe returns: a finding that has no name yet."""

    verdict: Verdict
    detail: str
    advice: str = ""
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found.

    Args:
        name: The probe.
        verdict: `fail` only for what syncd rests on; `warn` for what costs speed or comfort.
        detail: What was seen, with figures.
        advice: What to do about it: a command, an option; empty when there is nothing to do.
        figures: The figures in `detail`, by name, for programs.
    """

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
    figures: Figures = field(default_factory=dict)


def finding(name: str, answer: Answer) -> Finding:
    """Give an answer the name of its probe."""
    return Finding(name, answer.verdict, answer.detail, answer.advice, answer.figures or {})


def ok(detail: str, figures: Figures | None = None) -> Answer:
    """Return that all is well, or that it is information only."""
    return Answer("ok", detail, "", figures)


def warn(detail: str, advice: str = "", figures: Figures | None = None) -> Answer:
    """Return that syncd works, but worse than it could."""
    return Answer("warn", detail, advice, figures)


def fail(detail: str, advice: str = "", figures: Figures | None = None) -> Answer:
    """Return that something is not there which syncd rests on."""
    return Answer("fail", detail, advice, figures)


def skip(detail: str) -> Answer:
    """Return that it could not be looked at."""
    return Answer("skip", detail)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict of all: the worst of them, `ok` where nothing was found."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in _GRAVITY if verdict in found), "ok")


def errno_name(error: OSError) -> str:
    """Return the symbol of an error, as in `ENOSPC`."""
    if error.errno == errno.EOPNOTSUPP:
        # Python names this number ENOTSUP; manual pages and strace name it so.
        return "EOPNOTSUPP"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def milliseconds(seconds: float) -> str:
    """Return a duration as people read it: 0.21 ms, 3.4 ms, 120 ms, 29.8 s."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"  # noqa: PLR2004 - two digits are enough


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which `percent` of all lie, 0 for none: the nearest rank, never interpolated."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
