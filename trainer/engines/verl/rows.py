"""Samples as rows of tokens, and which rank takes which of them in which update. All ranks compute the same plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch

from syncd.errors import CorruptDataError
from trainer.experience.batch import Batch
from trainer.experience.sft import Example

Columns = Mapping[str, Mapping[int, torch.Tensor]]
"""Figures of response tokens, float32, by name and by the row's number."""

Slots = list[int | None]
"""Numbers of rows; None stands for a row of padding, which counts nowhere."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its tokens (int64), the length of its prompt, and which response tokens are learnt (int64).

    Rows with the same number of a rollout are its segments, one after the other; other rows have none.
    """

    tokens: torch.Tensor
    prompt: int
    mask: torch.Tensor
    rollout: int | None = None

    def response(self, values: torch.Tensor) -> torch.Tensor:
        """Return the part of a model's output, one value a position, that belongs to the response's tokens."""
        return values[self.prompt - 1 : len(self.tokens) - 1]


PADDING = Row(torch.zeros(2, dtype=torch.long), 1, torch.zeros(1, dtype=torch.long))


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one update over all ranks: numbers of rollouts and numbers of examples."""

    rollouts: list[int]
    examples: list[int]


def rollout_rows(batch: Batch) -> list[Row]:
    """Return rollouts as rows; neither a tool's tokens are learnt nor those whose version is unproven."""
    return [
        Row(torch.tensor(list(one.tokens)), one.prompt_length, torch.tensor(list(one.learnt)).long(), number)
        for one, number in zip(batch.experiences, batch.rollouts, strict=True)
    ]


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
    """Return the updates of one pass: neighbours together, in equal parts; without those that teach nothing.

    A rollout is in one update with all its segments.
    """
    found, nothing = [], list[int]()
    whole = [list(its) for _, its in groupby(range(len(rollouts)), key=lambda at: _sample(rollouts[at], at))]
    pieces = ([number for place in piece for number in whole[place]] for piece in _pieces(len(whole), parts))
    pairs = zip_longest(pieces, _pieces(len(examples), parts), fillvalue=nothing)
    for left, right in pairs:
        learnt = [number for number in left if rollouts[number].mask.any()]
        part = Part(left if learnt else [], right)
        if part.rollouts or part.examples:
            found.append(part)
    return found


def samples(rows: Sequence[Row], numbers: Iterable[int]) -> int:
    """Return how many samples are learnt from: a rollout counts once, however many segments it has."""
    return len({_sample(rows[number], number) for number in numbers if rows[number].mask.any()})


def _sample(row: Row, number: int) -> tuple[bool, int]:
    return (False, number) if row.rollout is None else (True, row.rollout)


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
