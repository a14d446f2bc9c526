"""What a snapshot of the daemon says of a fleet: the input of `admit`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from syncd.daemon.retention import is_quarantined
from syncd.daemon.snapshot import Module, Snapshot
from syncd.parts.rolling.admit import Engine, Fleet, Key
from syncd.protocol.engine_state import EngineReport, EngineState, engine_report_of
from syncd.protocol.mirror_report import mirror_of_presence
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rolling import READS_GATE, at_gate, unit_of
from syncd.protocol.step import StepState
from syncd.protocol.version import GoodVersion, Pair, Version, engine_label

_SERVES_NOTHING = (EngineState.UNREACHABLE, EngineState.WRONG, EngineState.DEAD, EngineState.STOPPED)


def fleet_of(snapshot: Snapshot, unit: str) -> Fleet:
    """Return a job's living engines and its versions; a `unit` pauses together: one engine, or all of a host."""
    version = snapshot.version
    return Fleet(
        engines=tuple(_engines(snapshot.explorers, unit)),
        ended=tuple(_ended(snapshot.explorers, unit)),
        published=_rolled(version) if version else None,
        last_good=version.last_good if version else None,
        by_rollback=version is not None and version.held_marker is not None,
        readable=frozenset(_readable(snapshot)),
    )


def _rolled(version: Version) -> GoodVersion:
    content = version.kind, version.path, version.digest
    return GoodVersion(*version.pair, *content, layout=version.layout, parent=version.parent)


def _readable(snapshot: Snapshot) -> Iterator[Key]:
    for step in snapshot.steps.values():
        if step.state is StepState.COMPLETE and not is_quarantined(step, snapshot):
            yield step.step, step.digest


def _engines(explorers: Mapping[str, Module], unit: str) -> Iterator[Engine]:
    for name in sorted(explorers):
        if explorers[name].alive and _has_engine(explorers[name].presence):
            yield engine_of_presence(name, explorers[name].presence, unit)


def _ended(explorers: Mapping[str, Module], unit: str) -> Iterator[Engine]:
    for name in sorted(explorers):
        module, presence = explorers[name], explorers[name].presence
        if not presence.problem and mirror_of_presence(presence) is None:
            if presence.status is RunningStatus.STOPPED:  # it has finished what it loaded
                yield replace(engine_of_presence(name, presence, unit), paused_for=None)
            elif not module.alive:
                yield engine_of_presence(name, presence, unit)


def _has_engine(presence: Presence) -> bool:
    is_running = presence.status is not RunningStatus.STOPPED and not presence.problem
    return is_running and mirror_of_presence(presence) is None


def engine_of_presence(name: str, presence: Presence, unit: str) -> Engine:
    report = engine_report_of(presence.info)
    state = report.state if report else EngineState.LOADED
    waits = READS_GATE in presence.reads
    return Engine(
        name=name,
        unit=unit_of(presence, unit),
        applied=presence.applied,
        is_proven=_is_proven(presence, report),
        serves=presence.applied is not None and state not in _SERVES_NOTHING,
        paused_for=_paused_for(presence, state, waits=waits),
        gave_up={(entry.generation, entry.step, entry.digest): entry.reason for entry in report.given_up}
        if report
        else {},
        waits=waits,
        incarnation=presence.incarnation,
    )


def _is_proven(presence: Presence, report: EngineReport | None) -> bool:
    proof = report.proof if report else None
    if proof is None or not proof.is_proven or presence.applied is None:
        return False
    return proof.version == engine_label(presence.applied, presence.applied_digest)


def _paused_for(presence: Presence, state: EngineState, *, waits: bool) -> Pair | None:
    """Return what an engine loads now. One that does not wait at the gate is not seen to fetch before it pauses."""
    if waits:
        gate = at_gate(presence.info)
        return gate.pair if gate and gate.passed else None
    return presence.loading if state is EngineState.LOADING else None
