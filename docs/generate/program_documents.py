"""More documents as types: of `explorer`, of the health check, and of a job whose mount does not answer."""

from typing import Any, Literal

from pydantic import with_config
from status_documents import STRICT
from typing_extensions import TypedDict


@with_config(STRICT)
class ReportedMount(TypedDict):
    state: str
    """Such as ok or stuck: [the states of a mount](troubleshooting.md#states-of-the-mount)."""
    since: float
    """Since when."""
    detail: str
    """What is wrong; empty if nothing is."""
    hint: str
    """A command that helps, or empty."""


@with_config(STRICT)
class ReportedVersion(TypedDict):
    generation: int
    """Of the version."""
    step: int
    """Of the version."""
    published_at: float
    """The daemon's date."""


@with_config(STRICT)
class LastReport(TypedDict):
    at: float
    """When the daemon wrote it, on this host's clock."""
    age: float
    """Seconds since then."""
    pid: int
    """The daemon's process."""
    runs: bool
    """Whether that process still runs."""
    job: str
    """Absolute path of the job."""
    state_dir: str
    """Absolute path of the state directory."""
    host: str
    """The daemon's host."""
    leads: bool
    """Whether it leads the job; else it is a stand-by."""
    status: str
    """What it does, for people."""
    mount: ReportedMount
    """The job's file system."""
    version: ReportedVersion | None
    """The published version; null before the first."""
    marker: int | None
    """The step that the trainer announced last; null if it names none."""
    explorers: int
    """How many explorers live."""
    lag: int
    """Steps that the slowest living explorer is behind."""
    free: int | None
    """Bytes free on the job's file system."""


@with_config(STRICT)
class StalledStatus(TypedDict):
    schema_version: Literal[2]
    """Of this document."""
    job: str
    """Absolute path of the job."""
    at: float
    """Now, on this host's clock."""
    known: LastReport | None
    """What a daemon of this host reported last; null if none did."""


@with_config(STRICT)
class AccessFinding(TypedDict):
    name: str
    """The rule, a stable word."""
    severity: Literal["fail", "warn", "info"]
    """fail: others can change what explorers load, or read a secret; warn: more open than needed."""
    what: str
    """What was found, and its consequence."""
    where: str
    """A path, or what else it is about."""
    mend: str
    """The command that fixes it; empty if there is none."""


@with_config(STRICT)
class AccessReport(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    protocol: int
    """Version of the protocol."""
    directory: str
    """The job, absolute."""
    permissions: str
    """`job.permissions` of its configuration."""
    findings: list[AccessFinding]
    """The most severe first."""
    verdict: Literal["ok", "warn", "fail"]
    """The most severe of the findings; `info` does not count."""


@with_config(STRICT)
class MeasuredStep(TypedDict):
    step: int
    """The step; 0 for the model that the job started from."""
    state: Literal["measured", "gone", "damaged", "failed"]
    """gone: it was removed; damaged: it is, or does not fit the engine; failed: the engine did not load it."""
    reason: str
    """Why it was not measured; empty if it was."""
    sets: list[dict[str, Any]]
    """A line of [`evaluations.jsonl`](evaluation.md) for each set, and `was_known`: by an earlier run."""


@with_config(STRICT)
class Bench(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    job: str
    """Absolute path of the job."""
    steps: list[MeasuredStep]
    """By number."""


@with_config(STRICT)
class Outcome(TypedDict):
    kind: Literal["applied", "nothing", "refused", "failed", "unreachable", "gone", "ended"]
    """refused: the version does not fit; failed: the load did; gone: the step was removed; nothing: none was due."""
    generation: int | None
    """Of the version; null if the outcome is of none."""
    step: int | None
    """Of the version."""
    reason: str
    """Why it was not applied; empty if it was."""
    timings: dict[str, float]
    """Seconds of each part of the load, by its name."""


@with_config(STRICT)
class Health(TypedDict):
    ready: bool
    """Whether the engine may get work."""
    state: str
    """The state of the engine, as in [status](#status)."""
    since: float | None
    """Since when; null before the follower has joined."""
    reason: str
    """Why it is in this state; empty if nothing is wrong."""
    version: str | None
    """Label of the version that it runs, such as 1.120."""


PROGRAMS: dict[str, type[Any]] = {
    "stalled status": StalledStatus,
    "doctor --security": AccessReport,
    "explorer bench": Bench,
    "syncd follow": Outcome,
    "health": Health,
}
"""By name: what is printed or answered."""
