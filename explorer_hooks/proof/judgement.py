"""Whether an engine runs a version: its log-probs of the version's probe, compared with the trainer's.

The mean difference decides. Measured on CPU with vLLM 0.32.0 and SGLang 0.5.23 against transformers in float32: at
most 1e-6 nats with the right weights, 0.77 and more with wrong ones. In bfloat16 two correct implementations
differ by about 1e-2 nats.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from explorer_hooks.hook import ProbeAnswer
from syncd.errors import LoadFailedError
from syncd.protocol.engine_state import Proof, finite
from syncd.protocol.probe import Probe

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


NEARER = 3.0
"""How many times nearer an answer must be to an older version's probe to be that version's."""

LEAST = 1e-5
"""How much nearer at the least, in nats: probes have 7 digits, and float32 rounds."""

KEPT = 16
"""The most probes of earlier versions that are kept."""


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


def sees_drift(probe: Probe, dtype: str | None) -> bool:
    """Return whether an answer may be compared with the probes of earlier versions too.

    If the published or the loaded weights are rounded and the trainer's are not, small updates do not change them for
    many versions: an engine that runs them rightly answers like the earlier version.
    """
    return len(_dtypes(probe, dtype)) == 1


def _dtypes(probe: Probe, dtype: str | None) -> set[str | None]:
    """Return the dtypes of trainer, published tensors and engine."""
    export = probe.compute_dtype if probe.export_dtype == "keep" else probe.export_dtype
    return {probe.compute_dtype, export, dtype}


def compare(
    version: str, probe: Probe, answer: ProbeAnswer, allowed: float, calibrated: float | None, seconds: float
) -> Proof:
    """Return how an engine's answer differs from a version's probe; what is not a number is infinitely far off."""
    if list(map(len, answer.logprobs)) != list(map(len, probe.logprobs)):
        raise LoadFailedError("the engine answered the probe with another number of log-probs")
    off = differences(probe, answer)
    mean, worst = finite(math.fsum(off) / len(off)), finite(_largest(off))
    return Proof(version, mean, worst, allowed, calibrated, len(off), round(seconds, 6))


def differences(probe: Probe, answer: ProbeAnswer) -> list[float]:
    """Return how far each log-prob of an answer is from that of a probe of the same tokens, in nats."""
    return [abs(a - b) for ours, theirs in zip(probe.logprobs, answer.logprobs, strict=True)
            for a, b in zip(ours, theirs, strict=True)]  # fmt: skip


class EarlierProbes:
    """The probes of versions that an engine has proven: some from the first to the last, and the nearest ones.

    While an engine stays on one version, its answers stay nearest to the probe of that one, which is therefore kept
    however many follow.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, Probe]] = []
        self._nearest: list[tuple[str, Probe]] = []
        self._every, self._skipped, self._last = 1, 0, ""

    def __iter__(self) -> Iterator[tuple[str, Probe]]:
        yield from self._kept
        yield from self._nearest

    def add(self, version: str, probe: Probe, answers: Sequence[ProbeAnswer] = ()) -> None:
        """Keep the probe of a version that was proven, or every second, fourth, eighth ... once there are many.

        Args:
            answers: Each replica's; of each, the probe that is nearest to it is kept too.
        """
        same = [(name, old) for name, old in (*self, (version, probe)) if old.digest == probe.digest]
        self._nearest = [
            min(same, key=lambda named: math.fsum(differences(named[1], answer))) for answer in answers
        ]
        if version == self._last:
            return
        self._last = version
        self._skipped += 1
        if self._skipped < self._every and self._kept:
            return
        self._skipped = 0
        self._kept.append((version, probe))
        if len(self._kept) > KEPT:
            del self._kept[1::2]  # the first stays
            self._every *= 2


def answers_like(version: str, proof: Proof, answer: ProbeAnswer, earlier: Iterable[tuple[str, Probe]],
                 probe: Probe) -> str:  # fmt: skip
    """Return the earlier version that an answer is much nearer to than to a version within the tolerance.

    If the answer is `d` from the new probe and less than `d / 3` from the old one, the two probes are more than
    `2 d / 3` apart: more than twice the noise of an engine that is on the old version. An engine on the new version
    would need noise that leads from the new probe to the old one, for all tokens together.

    Returns:
        The name of the nearest such version, empty if there is none.
    """
    distances = [
        (math.fsum(off) / len(off), name)
        for name, old in earlier
        if name != version and old.digest == probe.digest and (off := differences(old, answer))
    ]
    mean, name = min(distances, default=(math.inf, ""))
    return name if proof.mean > max(NEARER * mean, mean + LEAST) else ""


def other_start(proof: Proof) -> LoadFailedError:
    """Return what is wrong with an engine whose start weights do not answer the job's baseline."""
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
    if answer.fresh is None or answer.cached is None:
        return ""
    stale = abs(answer.fresh - answer.cached)
    if stale <= CACHE_MARGIN * proof.tolerance:
        return ""
    return f"the prefix cache holds keys and values of other weights: {stale:.3g} nats off for one token"


def worst_of(judged: Sequence[tuple[Proof, str]]) -> tuple[Proof, str]:
    """Return the proof by the worst replica of an engine, and why one of them proves nothing, empty if all do."""
    wrong = next((at for at, (_, reason) in enumerate(judged) if reason), None)
    where = f"replica {wrong} of {len(judged)}: " if len(judged) > 1 else ""
    worst = max((proof for proof, _ in judged), key=lambda proof: proof.mean)
    return replace(worst, replicas=len(judged)), "" if wrong is None else f"{where}{judged[wrong][1]}"


def stayed(version: str, proof: Proof) -> str:
    """Return the reason for an answer that is an earlier version's, empty if it is none's."""
    if not version:
        return ""
    old = "its start model" if version == START else f"version {version}"
    return f"the engine answers like {old}: this version is {proof.mean:.3g} nats off at the mean, that one much less"


def has_grown(proof: Proof) -> bool:
    return proof.calibrated is not None and proof.mean > GREW * proof.tolerance


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)
