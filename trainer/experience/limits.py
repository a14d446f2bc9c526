"""The limits of a model's rows: longer rows, and tokens outside the vocabulary, would fail inside the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncd.experience.model import Experience

MOST = 1e18
"""The largest magnitude of a reward or log-prob: losses and norms square them, and float32 ends at 3.4e38."""


@dataclass(frozen=True, slots=True)
class Limits:
    vocabulary: int | None = None  # token ids are below this; None where the engine knows no bound
    tokens: int | None = None  # tokens of the longest row; None where the engine knows no bound
    tokens_from: str = "the model"  # what bounds the length, for people

    def within(self, other: "Limits") -> "Limits":
        """Return these limits with the length of the longest row that both take."""
        if other.tokens is None or (self.tokens is not None and self.tokens <= other.tokens):
            return self
        return replace(self, tokens=other.tokens, tokens_from=other.tokens_from)

    def problem(self, experiences: Sequence[Experience]) -> str:
        """Return why a batch of experiences cannot be trained on, empty where it can."""
        for number, experience in enumerate(experiences):
            if problem := self.problem_of(experience.tokens) or _number_problem(experience):
                return f"row {number}: {problem}"
        return ""

    def problem_of(self, tokens: Sequence[int]) -> str:
        if self.tokens is not None and len(tokens) > self.tokens:
            return f"{len(tokens)} tokens where {self.tokens_from} takes {self.tokens} at most"
        largest = max(tokens, default=0) if self.vocabulary is not None else 0
        if self.vocabulary is not None and largest >= self.vocabulary:
            return f"token {largest} for a model of {self.vocabulary} tokens"
        return ""


UNLIMITED = Limits()


def _number_problem(experience: Experience) -> str:
    numbers: dict[str, Sequence[float]] = {
        "reward": [experience.reward],
        "reward of a turn": [turn.reward for turn in experience.turn_rewards or ()],
        "log-prob": experience.logprobs,
        "log-prob of a teacher": experience.teacher_logprobs or (),
    }
    for what, values in numbers.items():
        least, most = min(values, default=0.0), max(values, default=0.0)
        if max(-least, most) > MOST:
            return f"{what} {least if -least > MOST else most:g} is too large for float32 arithmetic"
    return ""
