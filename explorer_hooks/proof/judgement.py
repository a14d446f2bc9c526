"""Whether an engine runs a version: its log-probs of the version's probe, compared with the trainer's.

The mean difference decides. Measured on CPU with vLLM 0.32.0 and SGLang 0.5.23 against transformers in float32: at
most 1e-6 nats with the right weights, 0.77 and more with wrong ones. In bfloat16 two correct implementations
differ by about 1e-2 nats.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from explorer_hooks.hook import ProbeAnswer
from syncd.errors import LoadFailedError
from syncd.protocol.engine_state import Proof, finite
from syncd.protocol.probe import Probe

Rows = Sequence[Sequence[float]]

EXACT = "float32"

TABLE = {True: 1e-3, False: 0.1}
"""The tolerance without calibration, in nats, by whether trainer, export and engine all compute in float32."""

FLOOR = {True: 1e-4, False: 5e-3}
"""The least tolerance after calibration: a model that was trained on answers a little differently than its start."""

MARGIN = 8.0
"""The calibrated tolerance, in multiples of the difference that was measured with the start model."""

GREW = 0.5
"""The part of a calibrated tolerance above which a proven version is worth a warning."""

CACHE_MARGIN = 10.0
"""How much further one token may be off than the mean of all, in multiples of the tolerance."""


class UnprovenError(LoadFailedError):
    """The engine answers the probe of a version as other weights would."""

    code = "unproven"

    def __init__(self, message: str, proof: Proof, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.proof = proof


def tolerance(probe: Probe, dtype: str | None, calibrated: float | None) -> float:
    """Return the mean difference up to which a version is proven, in nats.

    Args:
        dtype: The dtype in which the engine computes, None if it does not say.
        calibrated: The mean difference that was measured with the start model, None if it was not.
    """
    is_exact = _dtypes(probe, dtype) == {EXACT}
    if calibrated is None:
        return TABLE[is_exact]
    return min(TABLE[is_exact], max(FLOOR[is_exact], MARGIN * calibrated))


def sees_changes(probe: Probe, dtype: str | None, stored: Collection[str | None] = ()) -> bool:
    """Return whether an engine's changes may be compared with the trainer's.

    If the published or the loaded weights are rounded and the trainer's are not, small updates do not change them for
    many versions: an engine that runs them rightly answers like the earlier version.

    Args:
        stored: The dtypes of the version's tensors. Those that were not cast are the trainer's own.
    """
    if probe.export_dtype == "keep" and stored:
        return set(stored) == {dtype}
    return len(_dtypes(probe, dtype)) == 1


def _dtypes(probe: Probe, dtype: str | None) -> set[str | None]:
    export = probe.compute_dtype if probe.export_dtype == "keep" else probe.export_dtype
    return {probe.compute_dtype, export, dtype}


def compare(
    version: str, probe: Probe, answer: ProbeAnswer, allowed: float, calibrated: float | None, seconds: float
) -> Proof:
    """Return how an engine's answer differs from a version's probe; what is not a number is infinitely far off."""
    if list(map(len, answer.logprobs)) != list(map(len, probe.logprobs)):
        raise LoadFailedError("the engine answered the probe with another number of log-probs")
    off = differences(probe.logprobs, answer.logprobs)
    mean, worst = finite(math.fsum(off) / len(off)), finite(_largest(off))
    return Proof(version, mean, worst, allowed, calibrated, len(off), round(seconds, 6))


def differences(rows: Rows, others: Rows) -> list[float]:
    """Return how far each log-prob is from that of the same token in others, in nats."""
    return [abs(a - b) for ours, theirs in zip(rows, others, strict=True)
            for a, b in zip(ours, theirs, strict=True)]  # fmt: skip


def other_start(proof: Proof) -> LoadFailedError:
    return LoadFailedError(
        f"it was started with another model than the job's: {proof.mean:.3g} nats from the trainer at the mean of "
        f"{proof.tokens} tokens, where {proof.tolerance:.3g} are tolerated",
        hint="start the engine on the job's model.path",
    )


def problem(proof: Proof, answer: ProbeAnswer) -> str:
    """Return why an answer does not prove a version, empty if it does."""
    if not proof.is_proven:
        return (
            f"the engine answers as other weights: {proof.mean:.3g} nats from the trainer at the mean of "
            f"{proof.tokens} tokens, where {proof.tolerance:.3g} are tolerated"
        )
    return stale_cache(answer, CACHE_MARGIN * proof.tolerance)


def stale_cache(answer: ProbeAnswer, allowed: float) -> str:
    """Return why an answer shows a prefix cache of other weights, empty if it does not, or was not asked."""
    if answer.fresh is None or answer.cached is None:
        return ""
    stale = abs(answer.fresh - answer.cached)
    if stale <= allowed:
        return ""
    return f"the prefix cache holds keys and values of other weights: {stale:.3g} nats off for one token"


def worst_of(judged: Sequence[tuple[Proof, str]]) -> tuple[Proof, str]:
    """Return the proof by the worst replica of an engine, and why one of them proves nothing, empty if all do."""
    wrong = next((at for at, (_, reason) in enumerate(judged) if reason), None)
    where = f"replica {wrong} of {len(judged)}: " if len(judged) > 1 else ""
    worst = max((proof for proof, _ in judged), key=lambda proof: proof.mean)
    return replace(worst, replicas=len(judged)), "" if wrong is None else f"{where}{judged[wrong][1]}"


def has_grown(proof: Proof) -> bool:
    return proof.calibrated is not None and proof.mean > GREW * proof.tolerance


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)
