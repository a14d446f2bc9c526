"""Writes the wave in the daemon's ticks, under its term."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncd.daemon.leader import DaemonLeader
from syncd.daemon.report import EventReporter
from syncd.daemon.snapshot import Module, Snapshot
from syncd.observe import event_names
from syncd.parts.rolling.admit import Policy, admit
from syncd.parts.rolling.fleet import fleet_of
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.rolling import CANARY, STOPPED, Wave, encode_wave
from syncd.protocol.version import GoodVersion, Pair, label_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncd.observe.events import Level

LOOK_EVERY = 0.5  # seconds between two readings of presences while anybody waits or loads
LOOK_NOW = 0.02  # seconds after which they are read where a canary is to be chosen
LOOK_UNTIL = 1.0  # seconds for which a canary waits for that: a thousand presences are read less often
BEAT = 5.0  # seconds between two beats of a wave that does not change

OFF_AFTER = 10.0
"""Seconds of a term without the table after which the file is removed.

A command such as `syncd prune` leads for a moment, and may not know the options of the daemon.
"""


class Rolling:
    """The wave of one job, as this daemon writes it while it leads."""

    def __init__(self, job: Job, clock: Clock, leader: DaemonLeader, reporter: EventReporter) -> None:
        self._job, self._clock, self._leader, self._reporter = job, clock, leader, reporter
        self.begin_term()

    def begin_term(self) -> None:
        self._wave: Wave | None = None
        self._written = self._off_since = self._looks_since = float("-inf")
        self._reported: Any = None
        self._counts: dict[str, int] = {}
        self._pair: Pair | None = None
        # Presences that were read before the version was published, while they choose no canary.
        self._stale: Mapping[str, Module] | None = None
        # One offset for the whole term: a clock that is set anew must not end anybody's patience.
        self._epoch = self._clock.time() - self._clock.monotonic()

    @property
    def every(self) -> float:
        wave = self._wave
        if self._stale is not None:
            return LOOK_NOW
        is_moving = wave is not None and bool(
            wave.admitted or wave.leaving or wave.waiting or wave.phase == CANARY
        )
        return LOOK_EVERY if is_moving else float("inf")

    def act(self, snapshot: Snapshot, options: Policy | None) -> Snapshot:
        if options is None:
            return self._end(snapshot)
        self._off_since = float("-inf")
        now = self._epoch + self._clock.monotonic()
        before = self._wave or inherited(snapshot.wave, now)
        chooses = not self._must_look(snapshot)
        wave = admit(fleet_of(snapshot, options.unit), options, before, now, chooses=chooses)
        self._write(wave)
        assert self._wave is not None  # it was just written
        self._report(self._wave, snapshot)
        return replace(snapshot, wave=self._wave)

    def _must_look(self, snapshot: Snapshot) -> bool:
        """Return whether to wait until presences are read again, since those of before a version choose no canary."""
        pair, now = snapshot.version.pair if snapshot.version else None, self._clock.monotonic()
        if pair != self._pair:
            self._pair, self._looks_since = pair, now
            self._stale = (
                snapshot.explorers if self._wave is not None else None
            )  # a new leader has just read them
        is_late = now - self._looks_since >= LOOK_UNTIL
        if snapshot.explorers is not self._stale or snapshot.unlisted or is_late:
            self._stale = None
        return self._stale is not None

    def _end(self, snapshot: Snapshot) -> Snapshot:
        """Remove the file, since versions are no longer rolled out; then nobody waits any more."""
        term, now = self._leader.term, self._clock.monotonic()
        if snapshot.wave is None and self._wave is None:
            return snapshot
        if self._off_since == float("-inf"):
            self._off_since = now
        if now - self._off_since < OFF_AFTER or term is None:
            return snapshot
        term.discard(self._job.rolling)
        if self._counts:
            self._reporter.publish(event_names.WAVE_PROGRESSED, "debug", **dict.fromkeys(self._counts, 0))
        self.begin_term()
        return replace(snapshot, wave=None)

    def _write(self, wave: Wave) -> None:
        """Write the wave if it differs from the last one, or a beat is due."""
        term, now = self._leader.term, self._clock.monotonic()
        assert term is not None  # only a leader acts
        stamped = replace(wave, term=term.token)
        if stamped == self._wave and now - self._written < BEAT:
            return
        stamped = replace(stamped, beat=wave.beat + 1)
        term.publish(self._job.rolling, encode_wave(stamped))
        self._wave, self._written = stamped, now

    # --- events ---------------------------------------------------------------------------------------------------

    def _report(self, wave: Wave, snapshot: Snapshot) -> None:
        counts = _counts(wave, snapshot)
        state = (wave.phase, wave.candidate, wave.approved, wave.by_word)
        if state != self._reported:
            stopped = next((item.reason for item in wave.stopped if _is(item.pair, snapshot)), "")
            level: Level = "error" if wave.phase == STOPPED else "info"
            shown = {
                "phase": wave.phase,
                "candidate": _label(wave.candidate),
                "approved": _label(wave.approved),
            }
            done = self._seconds_to_last(wave, snapshot)
            self._reporter.publish(
                event_names.WAVE_CHANGED,
                level,
                **shown,
                reason=stopped,
                by_word=wave.by_word,
                **counts,
                **done,
            )
        elif counts != self._counts:
            self._reporter.publish(event_names.WAVE_PROGRESSED, "debug", **counts)
        self._reported, self._counts = state, counts

    def _seconds_to_last(self, wave: Wave, snapshot: Snapshot) -> dict[str, float]:
        """Return the seconds from a publish until the last engine runs the version, once it does."""
        version, approved = snapshot.version, wave.approved
        if version is None or approved is None or version.pair != approved.pair or wave.phase != "idle":
            return {}
        return {"seconds": round(max(self._clock.time() - version.published_at, 0.0), 3)}


def inherited(wave: Wave | None, now: float) -> Wave:
    """Return the wave of the leader before: its slots begin anew, since its clock may be another one."""
    if wave is None:
        return Wave()
    admitted = {name: replace(slot, since=now) for name, slot in wave.admitted.items()}
    return replace(wave, admitted=admitted, leaving=dict.fromkeys(wave.leaving, now))


def _counts(wave: Wave, snapshot: Snapshot) -> dict[str, int]:
    paused = [
        name
        for name in wave.admitted
        if name in snapshot.explorers and snapshot.explorers[name].presence.applied is not None
    ]
    stopped = sum(_is(item.pair, snapshot) for item in wave.stopped)
    return {
        "admitted": len(wave.admitted),
        "slots": len(paused),
        "waiting": len(wave.waiting),
        "stopped": stopped,
    }


def _is(pair: tuple[int, int], snapshot: Snapshot) -> bool:
    return snapshot.version is not None and snapshot.version.pair == pair


def _label(version: GoodVersion | None) -> str | None:
    return label_of(version.pair) if version else None
