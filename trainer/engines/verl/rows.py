"""Samples as rows of tokens, and which rank takes which of them in which update. All ranks compute the same plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from syncd.errors import CorruptDataError
from syncd.experience.model import Experience
from trainer.experience.sft import Example

Columns = Mapping[str, Mapping[int, torch.Tensor]]
"""Figures of response tokens, float32, by name and by the row's number."""

Slots = list[int | None]
"""Numbers of rows; None stands for a row of padding, which counts nowhere."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: its tokens (int64), the length of its prompt, and which response tokens are learnt (int64)."""

    tokens: torch.Tensor
    prompt: int
    mask: torch.Tensor

    def response(self, values: torch.Tensor) -> torch.Tensor:
        """Return the part of a model's output, one value a position, that belongs to the response's tokens."""
        return values[self.prompt - 1 : len(self.tokens) - 1]


PADDING = Row(torch.zeros(2, dtype=torch.long), 1, torch.zeros(1, dtype=torch.long))


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one update over all ranks: numbers of rollouts and numbers of examples."""

    rollouts: list[int]
    examples: list[int]


def rollout_rows(experiences: Iterable[Experience]) -> list[Row]:
    """Return rollouts as rows; a tool's tokens are not learnt."""
    return [_row(one.tokens, one.prompt_length, torch.tensor(list(one.action_mask))) for one in experiences]


def example_rows(examples: Iterable[Example]) -> list[Row]:
    """Return examples as rows; the whole response is learnt."""
    return [
        _row(one.tokens, one.prompt_length, torch.ones(len(one.tokens) - one.prompt_length))
        for one in examples
    ]


def check_vocabulary(rows: Iterable[Row], size: int) -> None:
    """Refuse tokens that the model does not have: on a GPU they end the process without a word.

    Raises:
        CorruptDataError: There is one.
    """
    largest = max((int(row.tokens.max()) for row in rows), default=0)
    if largest >= size:
        hint = "explorers must use the tokenizer of model.path"
        raise CorruptDataError(f"token {largest} in a batch for a model of {size} tokens", hint=hint)


def split(rollouts: Sequence[Row], examples: Sequence[Row], parts: int) -> list[Part]:
    """Return the updates of one pass: neighbours together, in equal parts; without those that teach nothing."""
    found, nothing = [], list[int]()
    pairs = zip_longest(_pieces(len(rollouts), parts), _pieces(len(examples), parts), fillvalue=nothing)
    for left, right in pairs:
        learnt = [number for number in left if rollouts[number].mask.any()]
        part = Part(left if learnt else [], right)
        if part.rollouts or part.examples:
            found.append(part)
    return found


def deal(rows: Sequence[Row], numbers: Sequence[int], rank: int, ranks: int) -> Slots:
    """Return the rows of one rank: about as many tokens on each, longest first, and exactly as many rows."""
    order = sorted(numbers, key=lambda number: (-len(rows[number].tokens), number))
    turns = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    own: Slots = []
    for turn, row in enumerate(turns):
        place = rank if turn % 2 == 0 else ranks - 1 - rank
        own.append(row[place] if place < len(row) else None)
    return own


def fill(slots: Slots, most: int) -> tuple[Slots, int]:
    """Pad rows to equal micro-batches of at most `most`; return them and the size of a micro-batch."""
    count = -(-len(slots) // most)
    size = -(-len(slots) // count)
    return slots + [None] * (count * size - len(slots)), size


def _pieces(count: int, parts: int) -> Iterator[list[int]]:
    for part in range(parts):
        piece = range(count * part // parts, count * (part + 1) // parts)
        if piece:
            yield list(piece)


def _row(tokens: Sequence[int], prompt: int, mask: torch.Tensor) -> Row:
    return Row(torch.tensor(list(tokens)), prompt, mask.long())
