"""The gate of rolling updates: a follower loads a version once the wave admits it."""

from typing import ClassVar

from explorer_hooks.parts.rolling.turns import Other, goes_alone, is_admitted, target
from syncd.client.client import Client
from syncd.protocol.engine_state import engine_report_of
from syncd.protocol.presence import TTL, Liveness, Presence
from syncd.protocol.rolling import ALONE, READS_GATE, Wave, at_gate, unit_of, wave_or_closed
from syncd.protocol.version import Pair, Version

LOOK_EVERY = 2.0  # seconds between two readings of other explorers while nobody leads


class RollingGate:
    """Reads the wave of one job for one follower."""

    reads: ClassVar[str] = READS_GATE

    def __init__(self, client: Client) -> None:
        self._client, self._name = client, client.identity or ""
        self.path = client.job.rolling
        self._wave: Wave | None = None
        self._beaten = client.clock.monotonic()
        self._loading = Liveness(TTL)
        self._looked, self._others = float("-inf"), list[Other]()

    def update(self, data: bytes | None) -> None:
        before, wave = self._wave, None if data is None else wave_or_closed(data, self.path)
        if wave is None or before is None or (wave.term, wave.beat) != (before.term, before.beat):
            self._beaten = self._client.clock.monotonic()
        self._wave = wave

    def target(self, newest: Pair | None, applied: Pair | None) -> Pair | None:
        return newest if self._wave is None else target(self._wave, self._name, newest, applied)

    def version(self, pair: Pair) -> Version | None:
        wave = self._wave
        versions = (wave.candidate, wave.approved) if wave is not None else ()
        return next((version.version() for version in versions if version and version.pair == pair), None)

    def admits(self, pair: Pair, applied: Pair | None) -> bool:
        wave, now = self._wave, self._client.clock.monotonic()
        if wave is None or is_admitted(wave, self._name, pair, applied):
            return True
        if now - self._beaten < ALONE:
            return False
        self._look(wave, now)
        return goes_alone(wave, self._name, pair, self._others)

    def _look(self, wave: Wave, now: float) -> None:
        """Read the presences of the others, which tell whose turn it is."""
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        living = self._client.explorers.living()
        gates = {name: at_gate(presence.info) for name, presence in living.items()}
        self._loading.observe(
            now, [(name, gate.pair) for name, gate in gates.items() if gate and gate.passed]
        )
        waiting = [living[name] for name in sorted(living) if READS_GATE in living[name].reads]
        self._others = [self._other(wave, presence, now) for presence in waiting]

    def _other(self, wave: Wave, presence: Presence, now: float) -> Other:
        report, approved = engine_report_of(presence.info), wave.approved
        given_up = report.given_up if report else ()
        name = presence.identity
        return Other(
            name=name,
            unit=unit_of(presence, wave.unit),
            applied=presence.applied,
            is_loading=self._loading.silent_for(name, now) < wave.patience,
            has_given_up=approved is not None
            and any(version.is_of(approved.pair, approved.digest) for version in given_up),
        )
