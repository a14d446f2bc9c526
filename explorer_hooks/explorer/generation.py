"""The seam between the ready explorer and what generates: prompts in, groups of rollouts with their versions out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Generator as Iterated
from dataclasses import dataclass

from explorer_hooks.hook import Running
from syncd.protocol.version import Pair

BEFORE_THE_FIRST: Pair = (1, 0)
"""The version that nobody published: the model that the trainer starts from, which is continued by generation 1."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One group that is to be made.

    Args:
        prompt: Token ids of the prompt.
        samples: Rollouts of it.
        max_tokens: Tokens of a rollout at most.
        temperature: At which tokens are drawn from the whole distribution; 0 for the most probable token.
    """

    prompt: Sequence[int]
    samples: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response.

    Args:
        tokens: Its token ids, with the end of the text if it came to it.
        logprobs: Natural logarithm of each one's probability under the version that chose it.
        text: The response without special tokens.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str


@dataclass(frozen=True, slots=True)
class Made:
    """What became of one group.

    Args:
        place: Which of the asked groups it is.
        rollouts: Its rollouts; none where `problem` says why.
        first: The version that ran before the first token was asked for.
        last: The version that ran after the last token had come; a version in between was one of those in between.
        problem: Why there are no rollouts.
        again: Whether another attempt may succeed: the engine was away, or not on an applied version.
    """

    place: int
    rollouts: tuple[Rollout, ...] = ()
    first: Pair = BEFORE_THE_FIRST
    last: Pair = BEFORE_THE_FIRST
    problem: str = ""
    again: bool = False

    @property
    def oldest(self) -> Pair:
        """Return the oldest version that had a part in it."""
        return min(self.first, self.last)


class Generator(ABC):
    """Makes groups."""

    @abstractmethod
    def generate(self, asks: Sequence[Ask]) -> "Iterated[Made | None]":
        """Yield each group once, as it is done, and None now and then while none is; close it to give up.

        Raises:
            EngineDeadError: Nothing can be generated any more.
        """


Applied = Callable[[], Pair | None]
"""Says which version work may be done with now: the applied one, or `BEFORE_THE_FIRST`; None for none."""


def version_of(running: Running, applied: Pair | None) -> Pair | None:
    """Return the version that an engine's work is of, None where it must not be given any.

    Args:
        running: What the engine says of itself.
        applied: What work may be done with: what the follower has had confirmed, or `BEFORE_THE_FIRST`.
    """
    if running.paused or applied is None:
        return None
    is_so = running.label is None if applied == BEFORE_THE_FIRST else running.pair == applied
    return applied if is_so else None


def version_after(running: Running, first: Pair) -> Pair | None:
    """Return the version that an engine ended work of `first` with, None where the work cannot be told from others'.

    An engine that was restarted on the way forgets its version, so the work may be of anything. So it may where the
    engine names no version of the job.
    """
    if running.label is None:
        return first if first == BEFORE_THE_FIRST else None
    return running.pair
