"""What the page's server answers, as types; what is made of them is what `json_documents` says."""

from typing import Any, Literal

from pydantic import with_config
from status_documents import STRICT, Finished, Pair
from typing_extensions import TypedDict

PollState = Literal["starting", "fresh", "failing", "stuck"]
Heart = Literal["alive", "dead", "left", "unknown"]


@with_config(STRICT)
class ReadError(TypedDict):
    code: str
    """The stable code of the error."""
    message: str
    """What happened, and where."""
    hint: str | None
    """What to run next."""


@with_config(STRICT)
class Serving(TypedDict):
    syncd: str
    """Version of this server."""
    every: float
    """Seconds until the next request is worthwhile."""
    state: PollState
    """Of the last reading."""
    at: float | None
    """When the last reading that succeeded took place, on this host's clock."""
    age: float | None
    """Seconds since it began."""
    looking_for: float | None
    """Seconds since the current reading began; null if none is running."""
    error: ReadError | None
    """Of the last reading; null if it succeeded."""


@with_config(STRICT)
class PageServing(TypedDict):
    syncd: str
    """Version of this server."""
    every: float
    """Seconds until the next request is worthwhile."""
    state: PollState
    """Of the last reading."""
    at: float | None
    """When the last reading that succeeded took place, on this host's clock."""
    age: float | None
    """Seconds since it began."""
    looking_for: float | None
    """Seconds since the current reading began; null if none is running."""
    error: ReadError | None
    """Of the last reading; null if it succeeded."""
    overview: str | None
    """Where the overview of all jobs is, relative to the page; null with one job."""


@with_config(STRICT)
class RuleTotal(TypedDict):
    rule: str
    """The [rule](retention.md)."""
    keep: bool
    """Whether it keeps or removes."""
    steps: int
    """How many steps."""
    bytes: int
    """Bytes of these steps."""


@with_config(STRICT)
class PageData(TypedDict):
    schema_version: Literal[2]
    """Of this document."""
    serving: PageServing
    """About this server and its last scan."""
    status: dict[str, Any] | None
    """As [status](#status) without `schema_version`; null before the first scan ended. Explorers: the dead first."""
    ls: dict[str, Any] | None
    """As [ls](#ls) without `schema_version`, newest step first."""
    rules: list[RuleTotal]
    """How much each rule keeps or removes, of all steps."""
    events: list[dict[str, Any]]
    """[Events](events.md) that report a decision, newest first."""
    left_out: dict[str, int]
    """How many `steps`, `explorers`, `trainers` and `problems` the lists leave out."""
    ran: float | None
    """Of a finished job: seconds from the daemon's first event to the last version; null if unknown."""


@with_config(STRICT)
class Series(TypedDict):
    label: str
    """What the curve is called."""
    style: Literal["line", "step", "low", "high"]
    """step: a value holds until the next one; low and high: the edges of an area."""
    per_group: int
    """Of how many values in a row the extremes are given."""
    points: list[list[float | None]]
    """Each a date, a step or null, and a value; null if it is not finite."""


@with_config(STRICT)
class Chart(TypedDict):
    name: str
    """Its stable name."""
    title: str
    """Its heading."""
    unit: str
    """Of its values."""
    source: str
    """The file."""
    missing: str
    """Why there may be no value; empty if a job need not have any."""
    from_zero: bool
    """Whether zero belongs in the picture."""
    left_out: int
    """Figures of its family that are not drawn."""
    series: list[Series]
    """Its curves."""


@with_config(STRICT)
class ReadFile(TypedDict):
    name: str
    """Its name in the job."""
    bytes: int
    """Its size."""
    read: int
    """How far it was read."""
    ignored: int
    """Lines that could not be read."""


@with_config(STRICT)
class Charts(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    serving: Serving
    """About the reading of these files, as of `/data.json`."""
    charts: list[Chart]
    """In the order of the page."""
    files: list[ReadFile]
    """The files that they are from."""


@with_config(STRICT)
class Lane(TypedDict):
    explorer: str
    """The explorer."""
    gone: Literal["left", "dead", "gone"] | None
    """How its lane ended; null if it goes on."""
    spans: list[list[Any]]
    """Each since, until (null: still), generation, step (both null if unknown), state of the engine or null."""


@with_config(STRICT)
class Lanes(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    serving: Serving
    """About the reading of the journal, as of `/data.json`."""
    lanes: list[Lane]
    """By explorer."""
    left_out: int
    """Explorers that the list leaves out."""
    quarantined: list[int]
    """The steps that were quarantined."""
    until: float | None
    """When the journal's newest event was written."""


@with_config(STRICT)
class Rollout(TypedDict):
    explorer: str
    """Who wrote it."""
    batch: int
    """Number of its batch."""
    row: int
    """Row of its first segment in the batch."""
    task: str
    """Id of its task."""
    group: str
    """Id of its group."""
    rollout: int
    """Its number in the group."""
    reward: float
    """Its reward."""
    segments: int
    """How many segments it has."""
    prompt_tokens: int
    """Tokens of the first prompt."""
    response_tokens: int
    """Tokens of all responses."""
    unproven_tokens: int
    """Tokens of versions that are not proven."""
    versions: list[list[int]]
    """The newest 16 versions of its tokens, each generation and step."""
    created_at: float
    """When it was made, by the explorer's clock."""


@with_config(STRICT)
class BatchCounts(TypedDict):
    read: int
    """Batches in the list."""
    unread: int
    """Batches that are not."""


@with_config(STRICT)
class Unreadable(TypedDict):
    explorer: str
    """Who wrote it."""
    batch: int
    """Its number."""
    reason: str
    """Why it cannot be read."""


@with_config(STRICT)
class Rejected(TypedDict):
    explorer: str
    """Who wrote it."""
    name: str
    """Name of the file."""
    reason: str
    """Why the trainer rejected it."""
    at: float
    """When."""


@with_config(STRICT)
class Rollouts(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    enabled: Literal[True]
    """Without `--rollouts` it is false, and no other field follows."""
    serving: Serving
    """About the reading of batches, as of `/data.json`."""
    rollouts: list[Rollout]
    """Those that fit the filters, newest first."""
    batches: BatchCounts
    """How many batches."""
    unreadable: list[Unreadable]
    """Batches that cannot be read."""
    rejected: list[Rejected]
    """Files that the trainer rejected, newest first."""
    rows: int
    """How many rollouts one answer has at most."""
    found: int
    """How many fit the filters."""
    known: int
    """How many are in the list."""


@with_config(STRICT)
class Segment(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    state: Literal["ready"]
    """Else reading (ask again), or failed with `error`, and no other field follows."""
    task: str
    """Id of its task."""
    group: str
    """Id of its group."""
    rollout: int
    """Its number in the group."""
    reward: float
    """Its reward."""
    segment: int
    """Which segment of the rollout this is."""
    segments: int
    """How many there are."""
    created_at: float
    """When it was made, by the explorer's clock."""
    info: dict[str, Any]
    """What the explorer noted; long texts and lists are cut."""
    turn_rewards: list[list[float]]
    """End and reward of each turn."""
    prompt: dict[str, Any]
    """`length`, and of its first tokens `ids` and `texts` (null without a tokenizer)."""
    response: dict[str, Any]
    """`length`, `from`, and of the tokens from there on what the next table says."""
    archived: bool
    """Whether the trainer has used it."""
    text_missing: str
    """Why there are no texts; empty if there are."""


@with_config(STRICT)
class TrainerSummary(TypedDict):
    heart: Heart
    """What its heartbeat says."""
    status: str
    """What it reports of itself."""
    step: int | None
    """Its step."""


@with_config(STRICT)
class JobSummary(TypedDict):
    name: str
    """The last part of its path, or the path below `--root`."""
    href: str
    """Of its page, relative to `/`."""
    job: str
    """Its absolute path."""
    severity: Literal["critical", "warning", "notice", "ok", "unknown"]
    """Of its most urgent problem; critical too if its last scan failed or is stuck."""
    attention: str
    """Its most urgent problem, for people, or empty."""
    state: PollState
    """Of its last scan, as of `serving`."""
    at: float | None
    """The same."""
    age: float | None
    """The same."""
    looking_for: float | None
    """The same."""
    error: ReadError | None
    """The same."""
    version: Pair | None
    """The published version."""
    published: float | None
    """Seconds since it was published."""
    trainer: TrainerSummary | None
    """One that runs, if there is one."""
    finished: Finished | None
    """As of [status](#status)."""
    empty: bool
    """Whether it has no step yet."""
    explorers: int
    """How many live."""
    dead: int
    """How many are dead."""
    lag: int
    """Steps that the slowest living explorer is behind."""


@with_config(STRICT)
class RootSearch(TypedDict):
    path: str
    """The directory of `--root`."""
    state: PollState
    """Of the last search."""
    at: float | None
    """The same."""
    age: float | None
    """The same."""
    looking_for: float | None
    """The same."""
    error: ReadError | None
    """The same."""


@with_config(STRICT)
class OverviewServing(TypedDict):
    syncd: str
    """Version of this server."""
    every: float
    """Seconds until the next request is worthwhile."""
    root: RootSearch | None
    """With `--root`: the search for jobs."""
    left_out: int
    """Jobs beyond 64."""


@with_config(STRICT)
class Overview(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    serving: OverviewServing
    """About this server."""
    jobs: list[JobSummary]
    """The most urgent first, then by name."""


ROUTES: dict[str, type[Any]] = {
    "/data.json": PageData,
    "/charts.json": Charts,
    "/lanes.json": Lanes,
    "/rollouts.json": Rollouts,
    "/rollout.json": Segment,
    "/jobs.json": Overview,
}
"""By route of `syncd serve`: what it answers."""
