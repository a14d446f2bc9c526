"""What `syncd status --json` prints, as types, with what other documents have in common with it.

Each class is one JSON object, and the string below a field says what it means.
"""

from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""Of every object: no other field is there. What is published allows more, because a release may add some."""


@with_config(STRICT)
class Pair(TypedDict):
    generation: int
    """It grows when explorers go to a step that is not later than the one before."""
    step: int
    """The trainer's step."""


@with_config(STRICT)
class Delta(TypedDict):
    parent: int
    """The step that it is stored as changes of."""
    density: float
    """Share of the words that changed."""
    bytes: int
    """Bytes of the changes."""
    whole_bytes: int
    """Bytes of the files that a full save would have."""
    chain: int | None
    """Deltas since its keyframe, itself included; null if one is missing or damaged."""


@with_config(STRICT)
class Shortcut(TypedDict):
    parent: int
    """The step that the changes are of."""
    density: float
    """Share of the words that changed."""
    bytes: int
    """Bytes of the changes, which lie beside the whole files."""
    whole_bytes: int
    """Bytes of the whole files."""
    problem: str
    """Why nobody can use it; empty if it can be used."""


@with_config(STRICT)
class Quarantined(TypedDict):
    step: int
    """The step."""
    digest: str
    """Digest of its manifest."""
    reason: str
    """Why it is in quarantine."""


@with_config(STRICT)
class GoodVersion(TypedDict):
    generation: int
    """Of the version."""
    step: int
    """Of the version."""
    path: str
    """Its directory, relative to the job."""
    digest: str
    """Digest of its manifest."""


@with_config(STRICT)
class PublishedVersion(TypedDict):
    generation: int
    """It grows when explorers go to a step that is not later than the one before."""
    step: int
    """The trainer's step."""
    kind: str
    """weights, delta, lora or remote."""
    path: str
    """The directory to load, absolute; of a remote step its URI."""
    layout: str
    """syncd, or the layout of another framework."""
    digest: str
    """Digest of the manifest; of another framework's step a fingerprint."""
    published_at: float
    """The daemon's date."""
    age: float
    """Seconds since then, on this host's clock."""
    delta: Delta | None
    """Of a delta."""
    shortcut: Shortcut | None
    """Of a step that is stored whole with a shortcut."""
    previous: Pair | None
    """The version before."""
    held: bool
    """After a rollback: nothing newer is published until the trainer announces another step."""
    term: int
    """Of the daemon that published it."""
    quarantine: list[Quarantined]
    """The steps in quarantine."""
    last_good: GoodVersion | None
    """The newest published version that an engine has shown to run."""


@with_config(STRICT)
class Marker(TypedDict):
    step: int | None
    """The step that the trainer announced last; null if it names none."""
    text: str
    """What the file holds."""
    problem: str
    """What is wrong with it; empty if nothing is."""


@with_config(STRICT)
class Steps(TypedDict):
    total: int
    """Steps in the job."""
    filling: int
    """Of these, steps that are being written."""
    complete: int
    """Steps that can be loaded."""
    damaged: int
    """Steps that cannot."""
    bytes: int
    """Bytes of all steps."""
    pinned: list[int]
    """The pinned steps."""


@with_config(STRICT)
class Filling(TypedDict):
    step: int
    """The step that is being written."""
    present: int
    """Writers or shards that are there."""
    expected: int | None
    """Writers or shards in all; null while unknown."""
    bytes: int
    """Bytes so far."""
    layout: str
    """syncd, or the layout of another framework."""
    problem: str
    """What is missing."""


@with_config(STRICT)
class GivenUp(TypedDict):
    step: int
    """The step."""
    digest: str
    """Digest of its manifest."""
    reason: str
    """Why the engine did not load it."""
    refused: bool
    """Whether the engine can never load it."""
    generation: int | None
    """Generation of the version; null if the follower does not say."""


@with_config(STRICT)
class Proof(TypedDict):
    version: str
    """Label of the version, or `start` for the model that the engine was started with."""
    mean: float
    """Mean difference of the log-probs, in nats."""
    worst: float
    """Largest difference of one token, in nats."""
    tolerance: float
    """Mean difference up to which a version is proven, in nats."""
    calibrated: float | None
    """Mean difference that was measured with the start model; null if it was not."""
    tokens: int
    """Tokens that were compared."""
    seconds: float
    """How long the engine took to answer."""
    replicas: int
    """Data-parallel replicas that answered; the differences are those of the worst."""
    checksums: str
    """What the engine's checksums of its parameters say of the load; empty if nothing."""
    seen: float | None
    """Least part of the change since the version `since` whose absence would have been found; null if none."""
    since: str
    """Label of that version, `start` for the start model; empty if there is none."""


@with_config(STRICT)
class Engine(TypedDict):
    state: Literal[
        "waiting",
        "loading",
        "proven",
        "loaded",
        "refused",
        "failed",
        "unreachable",
        "wrong",
        "dead",
        "stopped",
    ]
    """The state of the engine; stopped: its explorer has stopped."""
    since: float
    """Since when, by the explorer's clock."""
    ready: bool
    """Whether it may get work; false if its explorer is dead or has stopped."""
    reason: str
    """Why it is in this state; empty if nothing is wrong."""
    loads: int
    """Versions that it loaded."""
    failures: int
    """Loads that failed or were refused since the explorer's start."""
    load_seconds: float | None
    """How long the last load took; null before the first."""
    proof: Proof | None
    """The last proof."""
    given_up: list[GivenUp]
    """The newest 8 versions that it gave up."""
    exam: str
    """Result of its exam: passed, failed, off, or why there was none; empty if nobody said."""
    unseen: list[str]
    """The kinds of tensors that the exam could not see."""


@with_config(STRICT)
class ReadBytes(TypedDict):
    origin: int
    """Bytes that its host read from the job's file system since its start."""
    peers: int
    """Bytes that it read from other hosts."""
    over_budget: bool
    """Whether it read more of the last version from the file system than a quarter beyond its share."""


@with_config(STRICT)
class Explorer(TypedDict):
    id: str
    """Its identity."""
    status: Literal["running", "require_sync", "stopped"]
    """What it reports of itself."""
    heart: Literal["alive", "dead", "left", "unknown"]
    """What its heartbeat says: [Heartbeats](commands.md#heartbeats)."""
    alive: bool | None
    """Whether it lives; null while that is unknown."""
    beat_age: float
    """Age of its last heartbeat by its own clock."""
    host: str
    """Its host."""
    pid: int
    """Its process."""
    applied: Pair | None
    """The version that it runs; null also while its engine names a version and does not prove it."""
    loading: Pair | None
    """The version that it loads now."""
    lag: int | None
    """Steps that it is behind; null while it has loaded nothing."""
    engine: Engine | None
    """Its engine; null if it reports none that can be read."""
    leases: list[int]
    """The steps that it reads."""
    read: ReadBytes | None
    """Where its host's bytes came from; null unless it also reads from other hosts."""


@with_config(STRICT)
class Trainer(TypedDict):
    id: str
    """Its identity."""
    status: Literal["running", "require_sync", "stopped"]
    """What it reports of itself."""
    heart: Literal["alive", "dead", "left", "unknown"]
    """What its heartbeat says."""
    alive: bool | None
    """Whether it lives; null while that is unknown."""
    beat_age: float
    """Age of its last heartbeat by its own clock."""
    host: str
    """Its host."""
    pid: int
    """Its process."""
    step: int | None
    """Its step."""
    waiting: dict[str, Any] | None
    """What it waits for: `for` (experiences), `path` and `since` (its clock); null if it waits for nothing."""


@with_config(STRICT)
class Daemon(TypedDict):
    heart: Literal["alive", "dead", "left", "unknown"]
    """What its heartbeat says."""
    term: int
    """Its term: it grows with each new leader."""
    host: str | None
    """Its host."""
    pid: int | None
    """Its process."""


@with_config(STRICT)
class RollingSlot(TypedDict):
    explorer: str
    """Who may load a version."""
    generation: int
    """Of the version."""
    step: int
    """Of the version."""
    since: float
    """Since when, by the daemon's clock."""
    age: float
    """Seconds since then, on this host's clock."""
    free: bool
    """Whether it counts nowhere, since its engine runs no version."""
    loads: bool
    """Whether it loads now."""


@with_config(STRICT)
class RollingStopped(TypedDict):
    generation: int
    """Of the version."""
    step: int
    """Of the version."""
    digest: str
    """Digest of its manifest."""
    reason: str
    """Why canaries stopped it."""


@with_config(STRICT)
class Rolling(TypedDict):
    phase: Literal["idle", "canary", "rolling", "stopped"]
    """idle: all run what is approved; canary: a version is tested; rolling: engines load what is approved."""
    candidate: Pair | None
    """The version that canaries test, or that is approved too; null if the published one is stopped."""
    approved: Pair | None
    """The version that all others load."""
    by_word: bool
    """Whether canaries only say that they run it: there was nothing to prove it by."""
    why: str
    """Why the first of those that wait does so."""
    limit: int
    """How many units may pause at once."""
    unit: Literal["engine", "host"]
    """What a unit is."""
    patience: float
    """Seconds after which a slot no longer counts."""
    stopped: list[RollingStopped]
    """The versions that canaries stopped, the newest 16."""
    slots: list[RollingSlot]
    """Who may load now."""
    waiting: list[str]
    """The explorers that come next, in order, at most 64."""
    old: list[str]
    """Explorers that do not wait for their turn, at most 64."""


@with_config(STRICT)
class Mirror(TypedDict):
    id: str
    """The name of its presence."""
    heart: Literal["alive", "dead", "left", "unknown"]
    """What its heartbeat says."""
    alive: bool | None
    """The same: null while it is not known."""
    beat_age: float
    """Seconds since its heartbeat by its own clock."""
    host: str
    """Its host."""
    pid: int
    """Its process."""
    source: str
    """What it copies."""
    target: str
    """Where to."""
    state: str
    """starting, current, copying, failing or standby."""
    generation: int | None
    """Of the newest version at the target; null before the first."""
    step: int | None
    """Of that version."""
    behind: int
    """Steps that the target is behind its source; at least 1 while it lacks a version."""
    left: int
    """Bytes to copy before it has the newest version."""
    detail: str
    """Why it cannot go on; empty if it can."""
    since: float
    """When the state began, by the mirror's clock."""


@with_config(STRICT)
class Disk(TypedDict):
    free: int | None
    """Bytes free on the job's file system."""
    job_bytes: int
    """Bytes of all steps."""
    mount: str
    """Where the file system is mounted."""
    type: str
    """Its type, such as nfs4."""
    network: bool
    """Whether it is a network file system."""


@with_config(STRICT)
class Request(TypedDict):
    kind: str
    """rollback or vacate."""
    step: int
    """The step."""
    reason: str
    """Why it was asked for."""


@with_config(STRICT)
class Problem(TypedDict):
    name: str
    """A stable name, below."""
    detail: str
    """What is wrong, for people."""


@with_config(STRICT)
class ProblemGroup(TypedDict):
    name: str
    """As in `problems`, but `dead_explorer` and `dead_trainer` for dead ones, and `presence` for presence files."""
    severity: Literal["critical", "warning", "notice"]
    """critical: no version can be published or used; warning: a part does not work; notice: nothing to do now."""
    count: int
    """How many problems."""
    text: str
    """What it is, for people, such as "9 explorers are dead"."""
    details: list[str]
    """What is said of each."""
    hint: str
    """A command that helps, or empty."""
    help: str
    """The address of its entry in [Troubleshooting](troubleshooting.md)."""


@with_config(STRICT)
class Finished(TypedDict):
    step: int
    """The last step."""
    reason: str
    """Why the training ended."""


@with_config(STRICT)
class Next(TypedDict):
    why: str
    """What the job lacks."""
    command: str
    """What to run next."""


@with_config(STRICT)
class Status(TypedDict):
    schema_version: Literal[2]
    """Of this document."""
    job: str
    """Absolute path of the job."""
    state_dir: str
    """Absolute path of the state directory."""
    at: float
    """When the job was scanned, on this host's clock."""
    version: PublishedVersion | None
    """The published version; null before the first."""
    marker: Marker
    """What the trainer announced."""
    newest_complete: int | None
    """The newest step that can be loaded, published or not."""
    steps: Steps
    """Counts of steps."""
    filling: list[Filling]
    """Steps that are being written."""
    explorers: list[Explorer]
    """By identity."""
    trainers: list[Trainer]
    """By identity."""
    daemon: Daemon | None
    """The leading daemon; null if none has ever led the job."""
    rolling: Rolling | None
    """Of [rolling updates](rolling.md); null without."""
    mirror_of: str | None
    """What a mirror copies into this job; null for a job of its own."""
    mirrors: list[Mirror]
    """The mirrors that read the job or lead it."""
    disk: Disk
    """The job's file system."""
    requests: list[Request]
    """Open requests."""
    finished: Finished | None
    """Of a job whose trainer ended after its last step; null while a trainer may run, and if nothing shows an end."""
    problems: list[Problem]
    """What is wrong."""
    problem_groups: list[ProblemGroup]
    """The problems by severity, each kind once."""
    next: Next | None
    """Of a job without steps."""
