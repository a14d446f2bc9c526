"""Asks an engine for its answers to probes, and judges them."""

from collections.abc import Callable

from explorer_hooks.follower.proof import (
    START,
    EarlierProbes,
    UnprovenError,
    answers_like,
    compare,
    problem,
    sees_drift,
    stayed,
    tolerance,
)
from explorer_hooks.hook import ProbingHook
from syncd.errors import DOCS
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import Proof
from syncd.protocol.probe import Probe
from syncd.transports.base import WeightDirectory, WeightTensors


class Prover:
    """Asks one engine for its answers to probes, and keeps what calibration has measured.

    Args:
        hook: The hook; None if the engine answers no probes.
        clock: This host's clock.
        baseline: Reads the probe of the job's start model, None while there is none.
    """

    def __init__(self, hook: ProbingHook | None, clock: Clock, baseline: Callable[[], Probe | None]) -> None:
        self._hook, self._clock, self._baseline = hook, clock, baseline
        self.calibrated: float | None = None
        self.last: Proof | None = None
        self._earlier = EarlierProbes()

    @property
    def is_held(self) -> bool:
        """Return whether the engine answers while its work is held, so before it serves what it has loaded."""
        return self._hook is not None and self._hook.probes == "held"

    def calibrate(self) -> Proof | None:
        """Measure how far an engine that runs its start weights is from the trainer; None if that cannot be asked.

        If the difference is above the tolerance of the table, the engine was started with another model.

        Raises:
            LoadFailedError: It gave no usable answer.
            EngineUnreachableError: It does not answer.
        """
        hook = self._answering()
        baseline = self._baseline() if hook else None
        if hook is None or baseline is None:
            return None
        self.calibrated = None
        proof, _ = self._ask(hook, START, None, baseline)
        self._earlier = EarlierProbes()
        if proof.is_proven:
            self.calibrated = proof.mean
            self._earlier.add(START, baseline)
        return proof

    def test_reload(self) -> Proof | None:
        """Have an engine that was calibrated read its start weights again, and answer the baseline once more.

        Returns:
            The proof; None if the engine was not calibrated, or cannot be asked to read its start weights.

        Raises:
            UnprovenError: It answers as other weights: this engine cannot reload this model.
            LoadFailedError: It could not read them.
            EngineUnreachableError: It does not answer.
        """
        hook = self._answering()
        baseline = self._baseline() if self.calibrated is not None else None
        if hook is None or baseline is None or not hook.reload_start():
            return None
        proof, reason = self._ask(hook, START, None, baseline)
        if reason:
            raise UnprovenError(
                f"this engine cannot reload this model: after reading its own start weights again, {reason}",
                hint=f"reload=restart starts it on each version: {DOCS}/proof.md#an-engine-that-cannot-reload",
            )
        return proof

    def can_prove(self, target: WeightDirectory | WeightTensors) -> bool:
        """Return whether there is a probe of a version, and the engine answers probes."""
        return target.probe is not None and self._answering() is not None

    def prove(self, target: WeightDirectory | WeightTensors) -> Proof | None:
        """Have the engine answer the probe of a version that it has loaded; None if nothing can be proven.

        Raises:
            UnprovenError: It answers as other weights.
            LoadFailedError: It gave no usable answer.
            EngineUnreachableError: It does not answer.
        """
        hook = self._answering()
        if target.probe is None or hook is None:
            return None
        proof, reason = self._ask(hook, target.label, target, target.probe)
        if reason:
            raise UnprovenError(reason, hint=f"{DOCS}/proof.md#a-failed-proof")
        self._earlier.add(target.label, target.probe)
        return proof

    def _answering(self) -> ProbingHook | None:
        """Return the hook if its engine answers probes."""
        return self._hook if self._hook is not None and self._hook.probes else None

    def _ask(
        self, hook: ProbingHook, name: str, target: WeightDirectory | WeightTensors | None, probe: Probe
    ) -> tuple[Proof, str]:
        begun = self._clock.monotonic()
        answer = hook.probe(target, probe.tokens)
        seconds = self._clock.monotonic() - begun
        dtype = hook.dtype()
        allowed = tolerance(probe, dtype, self.calibrated)
        self.last = proof = compare(name, probe, answer, allowed, self.calibrated, seconds)
        reason = problem(proof, answer)
        if not reason and target is not None and sees_drift(probe, dtype):
            reason = stayed(answers_like(name, proof, answer, self._earlier, probe), proof)
        return proof, reason
