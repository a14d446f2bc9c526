"""Asks an engine for its answers to probes, and has them judged."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from explorer_hooks.hook import ProbeAnswer, ProbingHook
from explorer_hooks.proof.calibrations import Calibration, Calibrations
from explorer_hooks.proof.changes import START, Anchor, Anchors, least_seen, stayed
from explorer_hooks.proof.ended_probes import EndedProbes
from explorer_hooks.proof.judgement import (
    UnprovenError,
    compare,
    problem,
    sees_changes,
    tolerance,
    worst_of,
)
from explorer_hooks.proof.parameter_check import DTYPES, ParameterCheck
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
        calibrations: Where what was measured is kept; None for nowhere.
    """

    def __init__(
        self,
        hook: ProbingHook | None,
        clock: Clock,
        baseline: Callable[[], Probe | None],
        ended: EndedProbes | None = None,
        calibrations: Calibrations | None = None,
    ) -> None:
        self._hook, self._clock, self._baseline, self._ended = hook, clock, baseline, ended
        self._calibrations = calibrations
        self._parameters = ParameterCheck(hook, clock) if hook is not None else None
        self.calibrated: float | None = None
        self.noise: float | None = None
        """How far the engine was from what its start weights answer; None if that was not asked."""
        self._start: Probe | None = None
        """What they answer."""
        self.last: Proof | None = None
        self.asked_at = -math.inf
        """When the engine was asked last, on the clock's monotonic time."""
        self.is_examined = False
        """Whether an exam has shown that a load reaches every tensor, and resets the prefix cache."""
        self._anchors = Anchors()
        self._answers: tuple[ProbeAnswer, ...] = ()
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
        self.calibrated, self._start, self._hint = None, None, FAILED
        proof, _ = self._ask(hook, START, None, baseline)
        self._anchors = Anchors()
        if proof.is_proven:
            self.calibrated = self.noise = proof.mean
            self._start = baseline
            self._anchors.add(Anchor(START, baseline, self._answers))
            if self._calibrations is not None:
                self._calibrations.keep(baseline, Calibration(proof.mean, self._answers))
        elif flags := hook.rounding():
            self._hint = ROUNDING.format(flags)
            raise LoadFailedError(
                f"with {flags} the engine is {proof.mean:.3g} nats from the trainer, where {proof.tolerance:.3g} are "
                "tolerated: whether it runs the job's start model is not known",
                hint=self._hint,
            )
        return proof

    def recall(self) -> None:
        """Take up what was measured on the start model of an engine of this kind, unless it was measured here."""
        baseline = self._baseline() if self._calibrations is not None and self.calibrated is None else None
        if baseline is None or self._calibrations is None:
            return
        if kept := self._calibrations.recall(baseline):
            self.calibrated = kept.mean
            self._anchors.add(Anchor(START, baseline, kept.answers))

    def test_reload(self) -> Proof | None:
        """Have an engine read its start weights again, and answer; None if not shown to be on them, or it cannot."""
        hook = self._answering(None) if self._start is not None else None
        return self._answer_again(hook) if hook is not None and hook.reload_start() else None

    def end_exam(self) -> Proof | None:
        """Take back what an exam has loaded; an engine that has read its start weights again answers once more."""
        is_back = self._hook is not None and self._hook.end_exam()
        hook = self._answering(None) if is_back else None
        return self._answer_again(hook) if hook is not None else None

    def _answer_again(self, hook: ProbingHook) -> Proof | None:
        if self._start is None:
            return None
        proof, reason = self._ask(hook, START, None, self._start)
        if reason:
            self._hint = CANNOT_RELOAD
            message = (
                f"this engine cannot reload this model: after reading its own start weights again, {reason}"
            )
            raise UnprovenError(message, proof, hint=self._hint)
        return proof

    def measure(self, start: Probe) -> str:
        """Measure how far the engine is from transformers on its start weights, where the job has no baseline.

        This is not the noise between engine and trainer, which only versions or a baseline can tell. Return why the
        engine is not on these weights, empty if it is.
        """
        hook = self._answering(None)
        if hook is None:
            return "it answers no probes"
        proof, reason = self._ask(hook, START, None, start)
        if not reason:
            self.noise, self._start = proof.mean, start
        self.last = None
        return reason

    @property
    def baseline(self) -> Probe | None:
        return self._baseline()

    def answers(self, target: WeightDirectory, probe: Probe) -> tuple[ProbeAnswer, ...]:
        """Return what each replica of the engine answers to a probe's tokens; it has just loaded the target."""
        hook = self._answering(target)
        if hook is None:
            raise LoadFailedError("it answers no probes")
        return self._answers_of(hook, target, probe)

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

    def prove(self, target: WeightDirectory | WeightTensors, *, again: bool = False) -> Proof | None:
        """Have the engine answer the probe of a version that it has loaded; None if nothing can be proven.

        Args:
            again: Whether it was proven before. Then an engine that was examined is asked about its cache, too.
        """
        hook = self._answering(target) if target.probe is not None else None
        if target.probe is None or hook is None:
            return None
        with_cache = again or not self.is_examined
        proof, reason = self._ask(hook, target.label, target, target.probe, with_cache=with_cache)
        if not reason and isinstance(target, WeightDirectory):
            reason = self._ask_checksums(target)
        if reason:
            raise UnprovenError(reason, proof, hint=self._hint)
        self._anchors.add(Anchor(target.label, target.probe, self._answers, _content(target)))
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
        self,
        hook: ProbingHook,
        name: str,
        target: WeightDirectory | WeightTensors | None,
        probe: Probe,
        *,
        with_cache: bool = True,
    ) -> tuple[Proof, str]:
        begun = self._clock.monotonic()
        self._answers = self._answers_of(hook, target, probe, with_cache=with_cache)
        self.asked_at = self._clock.monotonic()
        seconds, dtype = self.asked_at - begun, hook.dtype()
        allowed = tolerance(probe, dtype, self.calibrated)
        judged = [
            (
                proof := compare(name, probe, replica, allowed, self.calibrated, seconds),
                problem(proof, replica),
            )
            for replica in self._answers
        ]
        if target is not None and sees_changes(probe, dtype, _stored(target)):
            judged = self._judge_changes(Anchor(name, probe, self._answers, _content(target)), judged)
        self.last, reason = worst_of(judged)
        return self.last, reason

    def _answers_of(
        self,
        hook: ProbingHook,
        target: WeightDirectory | WeightTensors | None,
        probe: Probe,
        *,
        with_cache: bool = True,
    ) -> tuple[ProbeAnswer, ...]:
        hook.asks_cache = with_cache
        answer = (self._ended.ask if self._ended else hook.probe)(target, probe.tokens)
        return (answer, *answer.others)

    def _judge_changes(self, new: Anchor, judged: Sequence[tuple[Proof, str]]) -> list[tuple[Proof, str]]:
        """Return proofs that also say what would have been found, and why an engine has stayed where it was."""
        further = []
        for (proof, reason), changes in zip(judged, self._anchors.changes(new), strict=True):
            seen, since = least_seen(changes) or (None, "")
            further.append((replace(proof, seen=seen, since=since), reason or stayed(changes)))
        return further


def _content(target: WeightDirectory | WeightTensors) -> tuple[str, ...]:
    return (
        tuple(sorted(shard.digest for shard in target.shards)) if isinstance(target, WeightDirectory) else ()
    )


def _stored(target: WeightDirectory | WeightTensors) -> set[str | None]:
    """Return the dtypes of a version's tensors as torch names them; empty if they are not known."""
    if not isinstance(target, WeightDirectory):
        return set()
    return {DTYPES.get(tensor.dtype) for tensor in target.tensors.values()}
