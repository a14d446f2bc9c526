"""The exam of an engine: whether its way of loading reaches every tensor.

That does not depend on the version. So before an engine gets work, it loads a copy of its start model in which every
tensor differs by much, and its answers must be those of the copy: a tensor that stayed shows at many times the noise,
whatever the learning rate will be. Of an adapter the copy is one of the same layers and rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.proof.judgement import stale_cache
from syncd.errors import DOCS, CorruptDataError
from syncd.protocol.documents import Fields
from syncd.protocol.probe import Probe

SEEN = 10.0
"""How far a kind of tensor must move the answers to be seen, in multiples of the noise."""

NOISE = {True: 1e-5, False: 5e-3}
"""The noise that is reckoned with at the least, in nats, by whether the engine computes in float32."""

REMEDY = f"reload=restart starts it on each version, or another flag or release: {DOCS}/proof.md#the-exam"

TIED = "the head, tied to the embedding"
"""The kind of a head that has no tensor of its own."""

Rows = tuple[tuple[int, ...], ...]
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Exam:
    start: Probe  # the start model's answers
    exam: Values  # the copy's
    kinds: Mapping[str, Values]  # the copy's if one kind of tensor is left as it was, by kind
    size: int  # bytes of the copy
    seconds: float  # what it took to make it, and to compute the answers

    @staticmethod
    def read(fields: Fields) -> "Exam":
        rows, start = fields.items("tokens"), fields.items("start")
        probe = Probe(tuple(map(tuple, rows)), tuple(map(tuple, start)), fields.text("dtype"), "keep")
        kinds = fields.record("kinds").document
        exam = Exam(
            probe,
            _flat(fields.items("exam")),
            {kind: _flat(values) for kind, values in kinds.items()},
            fields.integer("size"),
            fields.number("seconds"),
        )
        if any(len(values) != probe.count for values in (exam.exam, *exam.kinds.values())):
            raise CorruptDataError("an exam has another number of log-probs", path=fields.path)
        return exam

    def unseen(self, noise: float) -> tuple[str, ...]:
        """Return the kinds of tensors that could stay without being noticed."""
        return tuple(sorted(kind for kind, by in self.distances().items() if by < SEEN * noise))

    def problem(self, answer: ProbeAnswer, noise: float) -> str:
        """Return what an engine has not loaded by its answer, empty if it has loaded all that it shows."""
        seen = {kind: by for kind, by in self.distances().items() if by >= SEEN * noise}
        answers = _flat(answer.logprobs)
        off = _distance(answers, self.exam) if len(answers) == len(self.exam) else math.inf
        if seen and off < min(seen.values()) / 2:
            return stale_cache(answer, SEEN * noise)
        if _distance(answers, _flat(self.start.logprobs)) < off / 2:
            return "it answers as before, so it has loaded nothing"
        near = min(seen, key=lambda kind: _distance(answers, self.kinds[kind]), default="")
        named = near and _distance(answers, self.kinds[near]) < off / 2
        stayed = f"{near} stayed as it was" if named else "tensors of more than one kind stayed as they were"
        return f"{stayed}: its answers are {off:.3g} nats from those of what it loaded"

    def distances(self) -> dict[str, float]:
        """Return how far the answers are from the copy's if one kind of tensor stays, in nats."""
        return {kind: _distance(values, self.exam) for kind, values in self.kinds.items()}


def noise_of(mean: float, dtype: str | None) -> float:
    return max(mean, NOISE[dtype == "float32"])


def _flat(rows: Any) -> Values:
    return tuple(float(value) for row in rows for value in row)


def _distance(values: Sequence[float], others: Sequence[float]) -> float:
    off = math.fsum(abs(a - b) for a, b in zip(values, others, strict=False)) / max(len(others), 1)
    return off if math.isfinite(off) else math.inf
