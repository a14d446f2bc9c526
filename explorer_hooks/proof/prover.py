"""Asks an engine for its answers to probes, judges them, and keeps which weights it has worked on unproven."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from explorer_hooks.hook import ProbeAnswer, ProbingHook, Unproven
from explorer_hooks.proof.ended_probes import EndedProbes
from explorer_hooks.proof.judgement import (
    START,
    EarlierProbes,
    UnprovenError,
    answers_like,
    compare,
    problem,
    sees_drift,
    stayed,
    tolerance,
    worst_of,
)
from explorer_hooks.proof.parameter_check import ParameterCheck
from syncd.errors import TROUBLESHOOTING, LoadFailedError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import Proof
from syncd.protocol.probe import Probe
from syncd.transports.base import WeightDirectory, WeightTensors

FAILED = f"{TROUBLESHOOTING}#a-failed-proof"
CANNOT_RELOAD = f"reload=restart starts it on each version: {TROUBLESHOOTING}#an-engine-that-cannot-reload"
ROUNDING = (
    "start the engine without {}, or --hook-option probe=false: its versions are loaded then, not proven"
)
"""The hints of a failed proof: whatever the cause, if the engine cannot reload, if it rounds too much for a proof."""


class Prover:
    """Asks one engine for its answers to probes, and keeps what calibration has measured.

    Args:
        hook: The hook; None if the engine answers no probes.
        baseline: Reads the probe of the job's start model, None while there is none.
        ended: Asks the engine; None to have the hook ask it, whatever becomes of it.
    """

    def __init__(
        self,
        hook: ProbingHook | None,
        clock: Clock,
        baseline: Callable[[], Probe | None],
        ended: EndedProbes | None = None,
    ) -> None:
        self._hook, self._clock, self._baseline, self._ended = hook, clock, baseline, ended
        self._parameters = ParameterCheck(hook, clock) if hook is not None else None
        self.calibrated: float | None = None
        self.last: Proof | None = None
        self._earlier = EarlierProbes()
        self._answers: Sequence[ProbeAnswer] = ()
        self._hint = FAILED

    @property
    def is_held(self) -> bool:
        """Return whether the engine answers while its work is held, so before it serves what it has loaded."""
        return self._hook is not None and self._hook.probes == "held"

    def forget_engine(self) -> None:
        """Take the engine for another one: it was started again, or may have been."""
        if self._ended is not None:
            self._ended.forget_engine()

    def calibrate(self) -> Proof | None:
        """Measure how far an engine that runs its start weights is from the trainer; None if that cannot be asked.

        If the difference is above the tolerance of the table, the engine was started with another model.
        """
        baseline = self._baseline()
        hook = self._answering(None) if baseline is not None else None
        if hook is None or baseline is None:
            return None
        self.calibrated, self._hint = None, FAILED
        proof, _ = self._ask(hook, START, None, baseline)
        self._earlier = EarlierProbes()
        if proof.is_proven:
            self.calibrated = proof.mean
            self._earlier.add(START, baseline, self._answers)
        elif flags := hook.rounding():
            self._hint = ROUNDING.format(flags)
            raise LoadFailedError(
                f"with {flags} the engine is {proof.mean:.3g} nats from the trainer, where {proof.tolerance:.3g} are "
                "tolerated: whether it runs the job's start model is not known",
                hint=self._hint,
            )
        return proof

    def test_reload(self) -> Proof | None:
        """Have an engine that was calibrated read its start weights again, and answer the baseline once more.

        Returns:
            The proof; None if the engine was not calibrated, or cannot be asked to read its start weights.
        """
        baseline = self._baseline() if self.calibrated is not None else None
        hook = self._answering(None) if baseline is not None else None
        if hook is None or baseline is None or not hook.reload_start():
            return None
        proof, reason = self._ask(hook, START, None, baseline)
        if reason:
            self._hint = CANNOT_RELOAD
            message = (
                f"this engine cannot reload this model: after reading its own start weights again, {reason}"
            )
            raise UnprovenError(message, proof, hint=self._hint)
        return proof

    def can_prove(self, target: WeightDirectory | WeightTensors) -> bool:
        return target.probe is not None and self._answering(target) is not None

    def begin(self, running: WeightDirectory | None, target: WeightDirectory) -> None:
        """Note the checksums before a load (`running`: None if unknown), if the probe alone may not prove it."""
        hook = self._answering(target)
        if hook is None or self._parameters is None:
            return
        allowed = 0.0
        if running is not None and target.probe is not None:
            allowed = tolerance(target.probe, hook.dtype(), self.calibrated)
        self._parameters.begin(running, target, allowed)

    def prove(self, target: WeightDirectory | WeightTensors) -> Proof | None:
        """Have the engine answer the probe of a version that it has loaded; None if nothing can be proven."""
        hook = self._answering(target) if target.probe is not None else None
        if target.probe is None or hook is None:
            return None
        proof, reason = self._ask(hook, target.label, target, target.probe)
        if not reason and isinstance(target, WeightDirectory):
            reason = self._ask_checksums(target)
        if reason:
            raise UnprovenError(reason, proof, hint=self._hint)
        self._earlier.add(target.label, target.probe, self._answers)
        return self.last

    def _ask_checksums(self, target: WeightDirectory) -> str:
        """Return why the engine's checksums show that it has not loaded a version, empty if they do not."""
        if self._parameters is None or self.last is None:
            return ""
        movement, reason = self._parameters.end(target)
        self.last = replace(self.last, checksums=movement.value if movement else "")
        return f"the engine's checksums are those of the version before: {reason}" if reason else ""

    def _answering(self, target: WeightDirectory | WeightTensors | None) -> ProbingHook | None:
        """Return the hook if its engine answers probes of a version, None: of its start weights."""
        if self._hook is None or not self._hook.probes:
            return None
        return self._hook if self._ended is None or self._ended.may_ask(target) else None

    def _ask(
        self, hook: ProbingHook, name: str, target: WeightDirectory | WeightTensors | None, probe: Probe
    ) -> tuple[Proof, str]:
        begun = self._clock.monotonic()
        answer = (self._ended.ask if self._ended else hook.probe)(target, probe.tokens)
        seconds = self._clock.monotonic() - begun
        self._answers, dtype = (answer, *answer.others), hook.dtype()
        allowed = tolerance(probe, dtype, self.calibrated)
        earlier = self._earlier if target is not None and sees_drift(probe, dtype) else ()
        judged = []
        for replica in self._answers:
            proof = compare(name, probe, replica, allowed, self.calibrated, seconds)
            reason = problem(proof, replica) or stayed(
                answers_like(name, proof, replica, earlier, probe), proof
            )
            judged.append((proof, reason))
        self.last, reason = worst_of(judged)
        return self.last, reason


class UnprovenLoads:
    """Which weights an engine has worked on without a proof. One thread changes it, any may read `by_label`."""

    def __init__(self) -> None:
        self.by_label: Mapping[str, Unproven] = {}
        self._pending: str | None = None

    def begin(self, label: str) -> None:
        """Note that the engine is about to work on weights whose probe it has not answered yet."""
        if label != self._pending:
            self.end(is_proven=False)
            self._pending = label
            self._note(label, self._failed(label), pending=True)

    def end(self, *, is_proven: bool) -> None:
        """Note that it has answered the probe, so that its work was of the right weights, or that it never will."""
        label, self._pending = self._pending, None
        if label is not None:
            self._note(label, self._failed(label) + (not is_proven), pending=False)

    def _failed(self, label: str) -> int:
        return self.by_label.get(label, Unproven()).failed

    def _note(self, label: str, failed: int, *, pending: bool) -> None:
        kept = {key: value for key, value in self.by_label.items() if key != label}
        self.by_label = {**kept, label: Unproven(failed, pending)} if failed or pending else kept
