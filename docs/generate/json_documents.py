"""What `--json` prints, as types. docs/json.md and docs/json-schema.json are made of them; tests check real output.

Each class is one JSON object, and the string below a field says what it means. Those of `syncd status`, which is the
longest document, are in `status_documents`.
"""

from typing import Any, Literal

from pydantic import with_config
from status_documents import STRICT, Delta, Rolling, Shortcut, Status
from typing_extensions import TypedDict


@with_config(STRICT)
class Policy(TypedDict):
    keep_last: int
    """As `[daemon]` of the [configuration](configuration.md#daemon)."""
    keep_every: int
    """The same."""
    keep_full: int
    """The same."""
    max_bytes: int
    """The same."""
    partial_grace: float
    """The same."""
    keep_previous: bool
    """The same."""
    prune: bool
    """The same."""
    prune_foreign: bool
    """The same."""


@with_config(STRICT)
class Step(TypedDict):
    step: int
    """The step."""
    directory: str
    """Name of its directory in the job."""
    layout: str
    """syncd, or the layout of another framework."""
    state: Literal["filling", "complete", "damaged"]
    """filling: it is being written."""
    kind: str
    """weights, delta, lora or remote."""
    full: bool
    """Whether a training can resume from it."""
    present: int
    """Writers or shards that are there."""
    expected: int | None
    """Writers or shards in all; null while unknown."""
    shards: int
    """Files of weights that are there; of a step that is being written, its writers."""
    shards_expected: int | None
    """The same in all; null while unknown."""
    bytes: int
    """Bytes so far."""
    digest: str
    """Digest of the manifest; of another framework's step a fingerprint."""
    parent: int | None
    """Of a delta, the step before."""
    delta: Delta | None
    """Of a complete delta."""
    shortcut: Shortcut | None
    """Of a step that is stored whole with a shortcut."""
    published: Literal["newest", "previous"] | None
    """Whether it is the published version, or the one before."""
    leases: list[str]
    """Explorers that read it."""
    pinned: bool
    """Whether an operator keeps it."""
    problem: str
    """What is missing or wrong."""
    quarantined: str | None
    """Why it is in quarantine."""
    keep: bool
    """Whether retention keeps it."""
    rule: str
    """The [rule](retention.md) that decides."""
    detail: str
    """Why."""


@with_config(STRICT)
class Listing(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    job: str
    """Absolute path of the job."""
    at: float
    """When the job was scanned, on this host's clock."""
    policy: Policy
    """The retention policy."""
    steps: list[Step]
    """By number."""


@with_config(STRICT)
class VerifiedShortcut(TypedDict):
    parent: int
    """The step that the changes are of."""
    bytes: int
    """Bytes of the changes."""
    problems: list[str]
    """What is wrong with it."""
    unproved: str
    """Why it was not applied; empty if it was."""


@with_config(STRICT)
class Verification(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    step: int
    """The step."""
    layout: str
    """syncd, or the layout of another framework."""
    level: Literal["header", "content"]
    """How closely it was checked."""
    ok: bool
    """Whether nothing is wrong with the step; true with problems of its shortcut alone."""
    bytes: int
    """Bytes of the step."""
    digest: str
    """Digest of the manifest."""
    problems: list[str]
    """What is wrong; the command prints the document before it exits with 65, too."""
    shortcut: VerifiedShortcut | None
    """Null if the step has none or is damaged."""


@with_config(STRICT)
class Waited(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    generation: int
    """Of the version."""
    step: int
    """Of the version."""
    kind: str
    """weights, delta, lora or remote."""
    layout: str
    """syncd, or the layout of another framework."""
    path: str
    """The directory to load, absolute; of a remote step its URI."""
    digest: str
    """Digest of the manifest."""
    published_at: float
    """The daemon's date."""


@with_config(STRICT)
class Publication(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    step: int
    """The step."""
    bytes: int
    """Bytes that were stored."""
    digest: str
    """Digest of the manifest."""
    shards: int
    """Files of weights."""
    kind: str
    """weights, delta or lora."""
    skipped: list[str]
    """Names in the directory that were not copied; those of directories end in `/`."""
    whole_bytes: int
    """Bytes of the files that the step stands for: `bytes` unless it is a delta."""
    why_whole: str
    """Why it is stored whole although `--delta-from` was given; else empty."""


@with_config(STRICT)
class Materialisation(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    step: int
    """The step."""
    directory: str
    """Where it is now, absolute."""
    kind: str
    """weights or delta."""
    digest: str
    """Digest of the manifest."""
    bytes: int
    """Bytes that were written."""


@with_config(STRICT)
class Pinned(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    step: int
    """The step."""
    pinned: Literal[True]
    """Always."""
    reason: str
    """Why, as it was given."""


@with_config(STRICT)
class Unpinned(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    step: int
    """The step."""
    pinned: Literal[False]
    """Always."""
    was_pinned: bool
    """Whether there was a pin."""


@with_config(STRICT)
class Decision(TypedDict):
    step: int
    """The step."""
    keep: bool
    """Whether it stays."""
    rule: str
    """The [rule](retention.md) that decides."""
    detail: str
    """Why."""


@with_config(STRICT)
class Pruning(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    dry_run: bool
    """Whether nothing was removed."""
    decisions: list[Decision]
    """By step."""


@with_config(STRICT)
class Rollback(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    generation: int
    """Of the version that was published."""
    step: int
    """Of that version."""
    path: str
    """Its directory, relative to the job."""
    published_at: float
    """The daemon's date."""


@with_config(STRICT)
class RollingOf(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    job: str
    """Absolute path of the job."""
    rolling: Rolling
    """Who may load which version."""


@with_config(STRICT)
class Finding(TypedDict):
    name: str
    """What was measured."""
    verdict: Literal["ok", "warn", "fail", "skip"]
    """fail: syncd relies on it; warn: it costs speed or comfort."""
    detail: str
    """What was seen."""
    advice: str
    """A command or option that helps, or empty."""
    figures: dict[str, Any]
    """The figures in `detail`, by name."""


@with_config(STRICT)
class Diagnosis(TypedDict):
    schema_version: Literal[1]
    """Of this document."""
    protocol: int
    """Version of the protocol."""
    directory: str
    """The directory, absolute."""
    findings: list[Finding]
    """One for each measurement."""
    peer: dict[str, Any] | None
    """Without `--peer` null; else `host`, how it sees this one (`outward`), and how this one sees it (`inward`)."""
    expect: dict[str, Any]
    """Expected latency and recommended settings."""
    verdict: Literal["ok", "warn", "fail", "skip"]
    """The worst of the findings."""


DOCUMENTS: dict[str, type[Any]] = {
    "status": Status,
    "ls": Listing,
    "verify": Verification,
    "wait": Waited,
    "publish": Publication,
    "materialise": Materialisation,
    "pin": Pinned,
    "unpin": Unpinned,
    "prune": Pruning,
    "rollback": Rollback,
    "rolling": RollingOf,
    "doctor": Diagnosis,
}
"""By command of `syncd`: what its `--json` prints."""
