"""What an explorer's presence says of its engine: its state, the last proof, and the versions it gave up.

The follower writes it into the presence's `info`; the daemon, `syncd status`, the page and the metrics read it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from syncd.errors import CorruptDataError
from syncd.protocol.documents import MAX_INTEGER, Fields, record_from
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.version import Pair

GIVEN_UP = 8  # how many given-up versions a presence names, the newest ones
UNSEEN = 64  # how many kinds of unseen tensors a presence names
_LONGEST = 512  # characters of a reason in a presence


class EngineState(StrEnum):
    """The state of an engine.

    waiting: it runs the weights that it was started with. loading: it is loading a version. proven: it answered the
    version's probe within the tolerance. loaded: it names the version, and there was nothing to prove it by.
    refused: the newest version does not fit or is damaged, so an older one runs. failed: the newest version could not
    be loaded or not be proven, so an older one runs. unreachable: it does not answer. wrong: it answers with weights
    of no version. dead: it can neither load nor be restored. stopped: its explorer has stopped; a reader says this,
    no explorer does.
    """

    WAITING = "waiting"
    LOADING = "loading"
    PROVEN = "proven"
    LOADED = "loaded"
    REFUSED = "refused"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    WRONG = "wrong"
    DEAD = "dead"
    STOPPED = "stopped"

    @property
    def is_trouble(self) -> bool:
        """Return whether a person should see to it: it can do no work, or runs an older version."""
        return self in _TROUBLE


_TROUBLE = frozenset(
    {
        EngineState.REFUSED,
        EngineState.FAILED,
        EngineState.UNREACHABLE,
        EngineState.WRONG,
        EngineState.DEAD,
    }
)


@dataclass(frozen=True, slots=True)
class Proof:
    """How an engine answered the probe of a version, against the trainer's log-probs."""

    version: str  # the label of the version, or `start` for the model that the engine was started with
    mean: float  # the mean difference over all tokens, in nats
    worst: float  # the largest difference of one token, in nats
    tolerance: float  # the mean difference up to which the version is proven, in nats
    calibrated: float | None  # the mean difference that was measured with the start model, None if it was not
    tokens: int  # how many log-probs were compared
    seconds: float  # how long the engine took to answer
    replicas: int = 1  # how many data-parallel replicas answered; the differences are those of the worst
    # What the engine's checksums of its parameters say of the load: docs/probe-format.md; empty if nothing.
    checksums: str = ""
    # The least part of the change since the version `since` whose absence would have been found; None if not even
    # an engine that stayed there would have been.
    seen: float | None = None
    since: str = ""

    @property
    def is_proven(self) -> bool:
        return self.mean <= self.tolerance


@dataclass(frozen=True, slots=True)
class GivenUp:
    step: int
    digest: str  # the digest of its manifest
    reason: str
    refused: bool  # whether it was refused before the engine was touched; else its load or its proof failed
    generation: int | None = None  # of the version; None if the follower does not say

    def is_of(self, pair: Pair, digest: str) -> bool:
        same_content = (self.step, self.digest) == (pair[1], digest)
        return same_content and self.generation in (None, pair[0])


@dataclass(frozen=True, slots=True)
class EngineReport:
    state: EngineState = EngineState.WAITING
    since: float = 0.0  # since when, in seconds since the epoch on the explorer's clock
    ready: bool = False  # whether it may be given work
    reason: str = ""  # why it is in this state, empty if nothing is wrong
    loads: int = 0  # versions loaded since the explorer's start
    failures: int = 0  # loads that failed or were refused since then
    load_seconds: float | None = None  # seconds of the last load, None before the first
    proof: Proof | None = None  # the last proof, None if there was none
    given_up: tuple[GivenUp, ...] = ()  # the newest versions that it gave up
    # Whether its way of loading reaches every tensor: passed, failed, off, or why it was not examined; empty if
    # nobody said.
    exam: str = ""
    unseen: tuple[str, ...] = ()  # the kinds of tensors that the exam could not see

    def document(self) -> dict[str, Any]:
        given_up = [
            asdict(version) | {"reason": version.reason[:_LONGEST]} for version in self.given_up[-GIVEN_UP:]
        ]
        return asdict(self) | {
            "state": self.state.value,
            "reason": self.reason[:_LONGEST],
            "given_up": given_up,
            "exam": self.exam[:_LONGEST],
            "unseen": [kind[:_LONGEST] for kind in self.unseen[:UNSEEN]],
        }


def engine_of(explorer: Presence) -> EngineReport | None:
    """Return what an explorer reports of its engine, None if it reports nothing that can be read."""
    report = engine_report_of(explorer.info)
    if report is None or explorer.status is not RunningStatus.STOPPED:
        return report
    return replace(report, state=EngineState.STOPPED, since=explorer.updated_at, ready=False, reason="")


def engine_report_of(info: Mapping[str, Any]) -> EngineReport | None:
    """Return what a presence's `info` says of an engine, None if it says nothing that can be read."""
    try:
        return _report(Fields(info, "info"))
    except (CorruptDataError, ValueError):
        return None


def _report(fields: Fields) -> EngineReport:
    proof = fields.optional_record("proof")
    return record_from(
        EngineReport,
        fields,
        "since",
        "ready",
        "loads",
        "failures",
        state=EngineState(fields.text("state")),
        reason=fields.text("reason")[:_LONGEST],
        proof=_proof(proof) if proof else None,
        given_up=tuple(_given_up(item) for item in fields.records("given_up")[-GIVEN_UP:]),
        exam=fields.text("exam", "")[:_LONGEST],
        unseen=tuple(str(kind)[:_LONGEST] for kind in fields.items("unseen")[:UNSEEN]),
    )


def _proof(fields: Fields) -> Proof:
    defaults = {"checksums": "", "since": ""}
    texts = {key: fields.text(key, defaults.get(key))[:_LONGEST] for key in ("version", *defaults)}
    return record_from(Proof, fields, **texts)


def _given_up(fields: Fields) -> GivenUp:
    texts = {key: fields.text(key)[:_LONGEST] for key in ("digest", "reason")}
    return record_from(GivenUp, fields, **texts)


def finite(value: float) -> float:
    """Return a number that JSON and every reader of the protocol can hold: infinity becomes 2**53."""
    return value if math.isfinite(value) and abs(value) <= MAX_INTEGER else float(MAX_INTEGER)
