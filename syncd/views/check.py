"""A status document as one line and an exit code, as monitoring plug-ins give them (`syncd status --check`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from syncd.errors import JobMissingError, StorageError, SyncdError, plain
from syncd.views.problem_groups import Severity, worst

Document = Mapping[str, Any]


class CheckState(IntEnum):
    """The state of a job; its value is the exit code of the plug-in convention (Nagios, Icinga, Sensu, Zabbix)."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_STATES = {Severity.CRITICAL.value: CheckState.CRITICAL, Severity.WARNING.value: CheckState.WARNING}
_MOST_DETAILS = 8


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """How old the newest version of a job that has not finished may be."""

    warning: float | None = None  # seconds above which its age is a warning; None for no limit
    critical: float | None = None  # seconds above which it is critical; None for no limit


@dataclass(frozen=True, slots=True)
class CheckResult:
    state: CheckState
    text: str  # why, for people to read
    figures: str = ""  # `name=value` with spaces between them; empty if nothing was read

    def __str__(self) -> str:
        line = f"SYNCD {self.state.name} - {_unpiped(self.text)}"
        return f"{line} | {self.figures}" if self.figures else line


def check(document: Document, limits: CheckLimits) -> CheckResult:
    """Return the state of a job by its status document."""
    state, text = _judge(document, limits)
    return CheckResult(state, text, _figures(document, limits))


def check_failed(error: SyncdError) -> CheckResult:
    """Return the state of a job that could not be read: critical if its mount fails, else unknown."""
    is_down = isinstance(error, StorageError) and not isinstance(error, JobMissingError)
    return CheckResult(CheckState.CRITICAL if is_down else CheckState.UNKNOWN, plain(str(error)))


def _judge(document: Document, limits: CheckLimits) -> tuple[CheckState, str]:
    urgent = [
        problem_group for problem_group in document["problem_groups"] if problem_group["severity"] in _STATES
    ]
    state = _STATES.get(worst(urgent), CheckState.OK)
    version = document["version"]
    if version is None:
        unknown = state if state is CheckState.CRITICAL else CheckState.UNKNOWN
        is_unread = any(problem_group["name"] == "version" for problem_group in urgent)
        said = "no version can be read" if is_unread else "nothing is published yet"
        return unknown, "; ".join((said, *map(_told, urgent)))
    text = f"version {version['generation']}.{version['step']} published {version['age']:.0f} s ago"
    if (end := document["finished"]) is not None:
        said = f"finished at step {end['step']}: {plain(end['reason'])}"
        return state, "; ".join((said, text, *map(_told, urgent)))
    age, over = _age_state(version["age"], limits)
    return max(age, state), "; ".join((f"{text}{over}", *map(_told, urgent)))


def _age_state(age: float, limits: CheckLimits) -> tuple[CheckState, str]:
    """Return the state of an age, and the limit that it is above."""
    if limits.critical is not None and age > limits.critical:
        return CheckState.CRITICAL, f", more than {limits.critical:g} s"
    if limits.warning is not None and age > limits.warning:
        return CheckState.WARNING, f", more than {limits.warning:g} s"
    return CheckState.OK, ""


def _told(problem_group: Document) -> str:
    """Return what is said of a group of problems, with its first details if there are several."""
    if problem_group["count"] == 1:
        return plain(problem_group["text"])
    more = ", ..." if problem_group["count"] > _MOST_DETAILS else ""
    return plain(f"{problem_group['text']} ({', '.join(problem_group['details'][:_MOST_DETAILS])}{more})")


def _unpiped(text: str) -> str:
    """Return a text without the character after which figures are read."""
    return text.replace("|", "/")


def _figures(document: Document, limits: CheckLimits) -> str:
    version, explorers = document["version"], document["explorers"]
    lag = max((item["lag"] or 0 for item in explorers if item["alive"] is not False), default=0)
    here = sum(item["alive"] is not False for item in explorers)
    engines = [item["engine"] for item in explorers if item["engine"] is not None]
    ready = [f"ready={sum(engine['ready'] for engine in engines)}"] if engines else []
    values = [f"explorers={here}", *ready, f"lag={lag}", f"bytes={document['steps']['bytes']}B"]
    if version is not None:
        put_aside = f"quarantined={len(version['quarantine'])}"
        age = f"age={version['age']:.3f}s{_thresholds(limits)}"
        values = [age, f"step={version['step']}", *values, put_aside]
    return " ".join(values)


def _thresholds(limits: CheckLimits) -> str:
    warning, critical = ("" if limit is None else f"{limit:g}" for limit in (limits.warning, limits.critical))
    return f";{warning};{critical}" if warning or critical else ""
