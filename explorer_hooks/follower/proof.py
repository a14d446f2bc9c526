"""Whether an engine runs a version: its log-probs of the version's probe, compared with the trainer's.

The mean difference decides. Measured on CPU with vLLM 0.32.0 and SGLang 0.5.23 against transformers in float32: at
most 1e-6 nats with the right weights, 0.77 and more with wrong ones. In bfloat16 two correct implementations
differ by about 1e-2 nats.
"""

import math
from collections.abc import Callable, Sequence

from explorer_hooks.hook import ProbeAnswer, ProbingHook
from syncd.errors import DOCS, LoadFailedError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import Proof, finite
from syncd.protocol.probe import Probe
from syncd.transports.base import WeightDirectory, WeightTensors

EXACT = "float32"

TABLE = {True: 1e-3, False: 0.1}
"""The tolerance without calibration, in nats, by whether trainer, export and engine all compute in float32."""

FLOOR = {True: 1e-4, False: 5e-3}
"""The least tolerance after calibration: a model that was trained on answers a little differently than its start."""

MARGIN = 8.0
"""The calibrated tolerance, in multiples of the difference that was measured with the start model."""

GREW = 0.5
"""The part of a calibrated tolerance above which a proven version is worth a warning."""

START = "start"
"""What a proof calls the model that the engine was started with."""

CACHE_MARGIN = 10.0
"""How much further one token may be off than the mean of all, in multiples of the tolerance."""


class UnprovenError(LoadFailedError):
    """The engine answers the probe of a version as other weights would."""

    code = "unproven"


def tolerance(probe: Probe, dtype: str | None, calibrated: float | None) -> float:
    """Return the mean difference up to which a version is proven, in nats.

    Args:
        probe: The version's probe.
        dtype: The dtype in which the engine computes, None if it does not say.
        calibrated: The mean difference that was measured with the start model, None if it was not.
    """
    export = probe.compute_dtype if probe.export_dtype == "keep" else probe.export_dtype
    is_exact = {probe.compute_dtype, export, dtype} == {EXACT}
    if calibrated is None:
        return TABLE[is_exact]
    return min(TABLE[is_exact], max(FLOOR[is_exact], MARGIN * calibrated))


def compare(
    version: str, probe: Probe, answer: ProbeAnswer, allowed: float, calibrated: float | None, seconds: float
) -> Proof:
    """Return how an engine's answer differs from a version's probe; what is not a number is infinitely far off.

    Raises:
        LoadFailedError: The answer is of other tokens.
    """
    if list(map(len, answer.logprobs)) != list(map(len, probe.logprobs)):
        raise LoadFailedError("the engine answered the probe with another number of log-probs")
    off = [abs(a - b) for ours, theirs in zip(probe.logprobs, answer.logprobs, strict=True)
           for a, b in zip(ours, theirs, strict=True)]  # fmt: skip
    mean, worst = finite(math.fsum(off) / len(off)), finite(_largest(off))
    return Proof(version, mean, worst, allowed, calibrated, len(off), round(seconds, 6))


def problem(proof: Proof, answer: ProbeAnswer) -> str:
    """Return why an answer does not prove a version, empty if it does."""
    if not proof.is_proven:
        return (
            f"the engine answers as other weights: {proof.mean:.3g} nats from the trainer at the mean of "
            f"{proof.tokens} tokens, where {proof.tolerance:.3g} are tolerated"
        )
    if answer.fresh is None or answer.cached is None:
        return ""
    stale = abs(answer.fresh - answer.cached)
    if stale <= CACHE_MARGIN * proof.tolerance:
        return ""
    return f"the prefix cache holds keys and values of other weights: {stale:.3g} nats off for one token"


def has_grown(proof: Proof) -> bool:
    """Return whether a proven version answers much worse than the start model did."""
    return proof.calibrated is not None and proof.mean > GREW * proof.tolerance


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


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
        if proof.is_proven:
            self.calibrated = proof.mean
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
                hint=f"{DOCS}/proof.md#an-engine-that-cannot-reload",
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
        allowed = tolerance(probe, hook.dtype(), self.calibrated)
        self.last = proof = compare(name, probe, answer, allowed, self.calibrated, seconds)
        return proof, problem(proof, answer)
