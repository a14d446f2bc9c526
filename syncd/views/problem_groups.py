"""What needs a person's attention: problems by severity, each kind once, and the command that comes next.

Pure functions over the status document, shared by the terminal and the page. docs/json.md documents what they return.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from syncd.errors import TROUBLESHOOTING

Document = Mapping[str, Any]


class Severity(StrEnum):
    """How urgent a problem is.

    critical: no version can be published or used. warning: a part of the job does not work. notice: no action now.
    """

    CRITICAL = "critical"
    WARNING = "warning"
    NOTICE = "notice"


class Kind(NamedTuple):
    """What is said of the problems of one name."""

    severity: Severity  # how urgent they are, unless the state of the job says otherwise
    anchor: (
        str  # the heading of its entry in docs/troubleshooting.md; braces for the word before the first colon
    )
    singular: str  # what is said of one, with its detail for the braces
    plural: str = "problems of this kind"  # what is said of several, after their number


_CRITICAL, _WARNING, _NOTICE = Severity
_UNREADABLE, _DAMAGED = "a-file-cannot-be-read", "a-document-is-damaged"
_DEAD = "an-explorer-or-a-trainer-is-dead"

KINDS: Mapping[str, Kind] = {
    "daemon": Kind(_CRITICAL, "no-daemon-leads", "{}"),
    "mount": Kind(_CRITICAL, "mount-{}", "mount: {}"),
    "lock": Kind(_CRITICAL, _UNREADABLE, "record of who leads: {}"),
    "version": Kind(_CRITICAL, _DAMAGED, "version file: {}"),
    "published_step": Kind(_CRITICAL, "step-damaged", "{}"),
    "dead_trainer": Kind(_CRITICAL, _DEAD, "trainer {} is dead", "trainers are dead"),
    "engine_wrong": Kind(
        _WARNING, "engine-wrong", "wrong engine of {}", "engines answer with other weights than they name"
    ),
    "engine_dead": Kind(_WARNING, "engine-dead", "dead engine of {}", "engines are dead"),
    "engine_unreachable": Kind(
        _WARNING, "engine-unreachable", "unreachable engine of {}", "engines do not answer"
    ),
    "dead_explorer": Kind(_WARNING, _DEAD, "explorer {} is dead", "explorers are dead"),
    "engine_failed": Kind(
        _WARNING, "engine-failed", "failed load of {}", "engines failed to load the newest version"
    ),
    "engine_refused": Kind(
        _WARNING, "engine-refused", "refused load of {}", "engines refused the newest version"
    ),
    "mirror_dead": Kind(_WARNING, "a-mirror-has-ended", "dead mirror of {}", "mirrors are dead"),
    "mirror_failing": Kind(_WARNING, "a-mirror-cannot-go-on", "mirror of {}", "mirrors cannot go on"),
    "damaged_step": Kind(_WARNING, "step-damaged", "damaged {}", "steps are damaged"),
    "quarantined_step": Kind(_WARNING, "step-quarantined", "quarantined {}", "steps are quarantined"),
    "rolling_stopped": Kind(_WARNING, "canaries-stopped-a-version", "canaries stopped {}"),
    "marker": Kind(_WARNING, _DAMAGED, "marker: {}"),
    "unreadable_presence": Kind(
        _WARNING, _UNREADABLE, "{}", "presences cannot be read, so no step is removed"
    ),
    "unreadable_directory": Kind(
        _WARNING, _UNREADABLE, "{}", "directories cannot be listed, so no step is removed"
    ),
    "presence": Kind(_WARNING, _DAMAGED, "{}", "presence files cannot be read"),
    "tracker": Kind(_WARNING, _DAMAGED, "tracker: {}"),
    "origin_budget": Kind(
        _WARNING,
        "hosts-read-more-than-their-share",
        "{}",
        "explorers read more of the last version from the file system than their share",
    ),
    "obstacle": Kind(_WARNING, _UNREADABLE, "{}", "files cannot be read"),
    "config": Kind(_WARNING, "exit-code-78", "configuration: {}"),
    "rolling_old": Kind(
        _NOTICE,
        "canaries-stopped-a-version",
        "explorer {} does not wait for its turn",
        "explorers do not wait for their turn",
    ),
    "document": Kind(_NOTICE, _DAMAGED, "{}", "documents are ignored"),
}
"""Names of groups, in the order in which those of one severity are shown."""

_UNKNOWN = Kind(_WARNING, "symptoms", "{}")
_OF_EXPLORERS = frozenset(
    {"dead_explorer", "engine_wrong", "engine_dead", "engine_unreachable", "engine_failed", "engine_refused"}
)
_OF_THE_ENDED = frozenset({"daemon", "dead_explorer", "dead_trainer"})
"""What is no reason to act once the job has finished."""

_RANKS = list(Severity)
_STEP = re.compile(r"step ([0-9]+)(?:: | is published)", re.ASCII)


def problem_groups(status: Document) -> list[dict[str, Any]]:
    """Return the problems of a status document, each kind once, the most urgent first.

    It needs `job`, `version`, `steps`, `problems`, `explorers`, `trainers`, `mirror_of` and `finished`.
    """
    groups: dict[str, list[str]] = {}
    for problem in status["problems"]:
        name, detail = _named(problem)
        groups.setdefault(name, []).append(detail)
    entries = [_group(status, name, details) for name, details in groups.items()]
    places = {name: rank for rank, name in enumerate(KINDS)}
    return sorted(
        entries, key=lambda entry: (_RANKS.index(entry["severity"]), places.get(entry["name"], len(places)))
    )


def worst(groups: Iterable[Document]) -> str:
    """Return the most urgent severity of some groups, `ok` if there are none."""
    return min((problem_group["severity"] for problem_group in groups), key=_RANKS.index, default="ok")


def _named(problem: Document) -> tuple[str, str]:
    """Return the name of a problem's group, and what is said of it there."""
    name, detail = problem["name"], problem["detail"]
    kind, _, identity = (detail if name == "dead" else name).partition("/")
    if name == "dead":
        return f"dead_{kind}", identity
    return ("presence", f"{name}: {detail}") if identity else (name, detail)


def _group(status: Document, name: str, details: list[str]) -> dict[str, Any]:
    kind = KINDS.get(name, _UNKNOWN)
    return {
        "name": name,
        "severity": _severity(status, name, kind).value,
        "count": len(details),
        "text": _text(status, name, kind, details),
        "details": details,
        "hint": _hint(status, name, details),
        "help": f"{TROUBLESHOOTING}#{kind.anchor.format(details[0].partition(':')[0])}",
    }


def _severity(status: Document, name: str, kind: Kind) -> Severity:
    if name in _OF_THE_ENDED and (status["finished"] or (name == "daemon" and _nobody_is_here(status))):
        return Severity.NOTICE
    if name in _OF_EXPLORERS and not any(map(_works, status["explorers"])):
        return Severity.CRITICAL
    return kind.severity


def _nobody_is_here(status: Document) -> bool:
    """Return whether every module has left, so that nobody needs a daemon."""
    return all(module["heart"] == "left" for module in (*status["explorers"], *status["trainers"]))


def _works(explorer: Document) -> bool:
    engine = explorer["engine"]
    return explorer["heart"] in ("alive", "unknown") and (engine is None or engine["ready"])


def _text(status: Document, name: str, kind: Kind, details: list[str]) -> str:
    said = kind.singular.format(details[0]) if len(details) == 1 else f"{len(details)} {kind.plural}"
    return f"{said}; a finished job needs none" if name == "daemon" and status["finished"] else said


def _hint(status: Document, name: str, details: list[str]) -> str:
    """Return the command that helps, empty if there is none that always does."""
    job = shlex.quote(status["job"])
    if name == "daemon":
        if source := status.get("mirror_of"):
            return f"syncd mirror {shlex.quote(source)} {job}"
        is_obvious = status["finished"] or _is_empty(status)
        return "" if is_obvious else f"syncd watch {job}"
    if name == "rolling_stopped":
        return f"syncd rolling {job}"
    step = _STEP.match(details[0]) if name in ("damaged_step", "quarantined_step", "published_step") else None
    return f"syncd verify {job} {step[1]} --deep" if step else ""


def _is_empty(status: Document) -> bool:
    return status["version"] is None and not status["steps"]["total"]


def next_command(status: Document, job_file: str) -> dict[str, str] | None:
    """Return the command that comes next for a job in which nothing was published, and why; None for others.

    Args:
        status: With `job`, `version`, `steps`, `trainers` and `daemon`.
        job_file: The file that trains the job, empty if none is known.
    """
    if not _is_empty(status):
        return None
    job = shlex.quote(status["job"])
    if any(module["heart"] in ("alive", "unknown") for module in status["trainers"]):
        return {"why": "the trainer has not published a step yet", "command": f"syncd wait {job}"}
    if job_file:
        command = f"trainer train {shlex.quote(job_file)}"
        return {"why": "nothing has trained this job yet", "command": command}
    leads = status["daemon"] is not None and status["daemon"]["heart"] in ("alive", "unknown")
    if not leads:
        return {"why": "this job is empty", "command": f"syncd watch {job}"}
    return {"why": "this job has no step yet", "command": f"syncd publish {job} 1 MODEL_DIRECTORY"}
