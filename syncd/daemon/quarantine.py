"""Quarantine: which steps are put aside, and which version is the last good one. Pure functions of a snapshot.

A step is put aside with the content that it has, `(step, digest)`: the daemon itself has read damage in it twice, or
all living engines that tried it, at least two, have given it up. One engine of several never suffices, because the
fault may be the engine's; unless versions are rolled out and canaries have stopped it, before others tried it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from syncd.daemon.retention import is_abandoned, is_quarantined, vacating
from syncd.daemon.snapshot import Snapshot
from syncd.protocol.engine_state import EngineReport, EngineState, engine_report_of
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import GoodVersion, Pair, Quarantined, Version, engine_label

AT_LEAST = 2  # engines that must have given a step up
MOST = 64  # entries that the version file holds: those of steps that still exist first, then the newest steps
_LONGEST = 200  # characters of a reason in the version file

_UNDECIDED = (EngineState.LOADING, EngineState.FAILED)
"""The states in which an engine may be trying a version, or may be about to try it again."""


class _Engine(NamedTuple):
    presence: Presence
    report: EngineReport | None

    def reason_against(self, step: Step) -> str | None:
        reasons = (
            [version.reason for version in self.report.given_up if _key(version) == _key(step)]
            if self.report
            else []
        )
        return reasons[-1] if reasons and self.presence.applied_digest != step.digest else None

    def shown(self, version: Version | None, *, can_prove: bool) -> tuple[Pair, str] | None:
        """Return the version that it has shown to run, and its digest; where none can prove, that it names."""
        pair, digest, report = self.presence.applied, self.presence.applied_digest, self.report
        if pair is None:
            return None
        if version is not None and pair == version.pair:
            digest = version.digest
        proof = report.proof if report else None
        if proof and proof.is_proven and proof.version == engine_label(pair, digest):
            return pair, digest
        is_loaded = report is None or report.state is EngineState.LOADED
        return (pair, digest) if is_loaded and not can_prove else None

    def may_run(self, pair: Pair) -> bool:
        presence, report = self.presence, self.report
        is_there = presence.applied is not None and presence.applied >= pair
        is_trying = report is not None and report.state in _UNDECIDED
        return is_there or is_trying or presence.loading == pair or pair[1] in presence.leases


def judged(snapshot: Snapshot, version: Version, *, reports: bool) -> Version:
    """Return a version with what is in quarantine now, and with the last good version.

    Args:
        reports: Whether to read what engines report. With thousands of them that takes too long before a publish.
    """
    engines = _engines(snapshot) if reports else []
    quarantine = _quarantined(replace(snapshot, version=version), engines)
    now = replace(snapshot, version=replace(version, quarantine=quarantine))
    return replace(version, quarantine=quarantine, last_good=_last_good(now, engines))


def released(snapshot: Snapshot, version: Version, step: Step) -> Version:
    """Return a version whose step a person has asked for: out of quarantine, and engines cannot put it back."""
    quarantined = _quarantined(snapshot, _engines(snapshot))
    if _key(step) not in map(_key, quarantined):
        return version
    left = tuple(entry for entry in quarantined if _key(entry) != _key(step))
    return replace(version, quarantine=left, released=(*version.released, _key(step))[-MOST:])


def _quarantined(snapshot: Snapshot, engines: list[_Engine]) -> tuple[Quarantined, ...]:
    """Return the steps that are put aside: those of before, unless they were written again, and new ones."""
    before = snapshot.version.quarantine if snapshot.version else ()
    entries = {_key(entry): entry for entry in before if not _is_written_again(entry, snapshot)}
    for entry in (*_damaged(snapshot), *_given_up(snapshot, engines), *_stopped(snapshot)):
        entries.setdefault(_key(entry), entry._replace(reason=entry.reason[:_LONGEST]))
    # The same entries each time, whatever was added last: else each scan would write the file again.
    kept = sorted(entries.values(), key=lambda entry: (entry.step in snapshot.steps, entry.step))[-MOST:]
    return tuple(sorted(kept))


def _is_written_again(entry: Quarantined, snapshot: Snapshot) -> bool:
    step = snapshot.steps.get(entry.step)
    return step is not None and step.digest not in ("", entry.digest)


def _damaged(snapshot: Snapshot) -> Iterator[Quarantined]:
    for step in snapshot.steps.values():
        if step.rejected:
            yield Quarantined(step.step, step.digest, f"damaged: {step.problem}")


def _given_up(snapshot: Snapshot, engines: list[_Engine]) -> Iterator[Quarantined]:
    version = snapshot.version
    if version is None:
        return
    named = {_key(entry) for engine in engines if engine.report for entry in engine.report.given_up}
    for number, digest in sorted(named - {*version.released}):
        step = snapshot.steps.get(number)
        if step is None or step.digest != digest or not digest:
            continue
        against = [engine.reason_against(step) for engine in engines]
        reasons = [reason for reason in against if reason is not None]
        others = [engine for engine, reason in zip(engines, against, strict=True) if reason is None]
        is_doubted = any(engine.may_run((version.generation, number)) for engine in others)
        if len(reasons) >= AT_LEAST and not is_doubted:
            yield Quarantined(number, digest, f"{len(reasons)} engines gave it up: {reasons[0]}")


def _stopped(snapshot: Snapshot) -> Iterator[Quarantined]:
    """Yield the versions that canaries have stopped, unless an operator has released one since."""
    version, wave = snapshot.version, snapshot.wave
    for entry in wave.stopped if version is not None and wave is not None else ():
        step = snapshot.steps.get(entry.step)
        is_released = version is None or (_key(entry) in version.released and entry.pair != version.pair)
        if step is not None and step.digest == entry.digest and not is_released:
            yield Quarantined(entry.step, entry.digest, f"canaries stopped it: {entry.reason}")


def _engines(snapshot: Snapshot) -> list[_Engine]:
    living = (module.presence for module in snapshot.explorers.values() if module.alive)
    return [
        _Engine(presence, engine_report_of(presence.info))
        for presence in living
        if presence.status is not RunningStatus.STOPPED
    ]


def _last_good(snapshot: Snapshot, engines: list[_Engine]) -> GoodVersion | None:
    """Return the newest version that an engine has shown to run; where none can prove anything, that it names."""
    before = snapshot.version.last_good if snapshot.version else None
    # An engine that has proofs and says `loaded` has met a version without a probe: nobody can prove that one.
    can_prove = any(
        candidate and candidate.proof and candidate.state is not EngineState.LOADED
        for _, candidate in engines
    )
    shown = (engine.shown(snapshot.version, can_prove=can_prove) for engine in engines)
    versions = [_good_version(pair, digest, snapshot) for pair, digest in filter(None, shown)]
    good = [
        candidate
        for candidate in (before, *versions)
        if candidate is not None and _is_usable(candidate, snapshot)
    ]
    return max(good, key=lambda candidate: candidate.pair, default=None)


def _good_version(pair: Pair, digest: str, snapshot: Snapshot) -> GoodVersion | None:
    """Return a version that an engine runs, None if the step has other content now or was never published."""
    step, version = snapshot.steps.get(pair[1]), snapshot.version
    if version is None or step is None or digest != step.digest or pair > version.pair:
        return None
    return GoodVersion(*pair, step.kind, step.payload, digest, step.layout, step.parent)


def _is_usable(good: GoodVersion, snapshot: Snapshot) -> bool:
    step = snapshot.steps.get(good.step)
    if step is None or step.state is not StepState.COMPLETE or step.digest != good.digest:
        return False
    is_left = is_abandoned(step, snapshot) or is_quarantined(step, snapshot)
    return not is_left and good.step not in vacating(snapshot)


def _key(entry: object) -> tuple[int, str]:
    return entry.step, entry.digest  # type: ignore[attr-defined]
