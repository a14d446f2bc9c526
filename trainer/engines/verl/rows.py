"""One batch as rows of tokens: the updates of a step, and the rows of each rank, the same on all. Needs no verl."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, TypeVar

import torch

from syncd.errors import CorruptDataError, UsageError
from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.transports.ranks import Ranks
from trainer.config.algorithms import GAE, SFT
from trainer.config.options import correction
from trainer.engines.base import Metrics
from trainer.engines.verl.figures import MISMATCH, OF_ROLLOUTS, StepMetrics, batch_metrics
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits
from trainer.experience.sft import Example

T = TypeVar("T")

Columns = Mapping[str, Mapping[int, torch.Tensor]]
"""Values of response tokens, float32, by name and by the row's number."""

RowTensors = dict[int, torch.Tensor]  # values of response tokens, float32 in main memory, by the row's number
Slots = list[int | None]  # numbers of rows; None is a row of padding, which has no effect

_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""Names of tables of learnt positions in transformers. Rotary positions have no table and no limit."""


@dataclass(frozen=True, slots=True)
class TokenRow:
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


PADDING = TokenRow(torch.zeros(2, dtype=torch.long), 1, torch.zeros(1, dtype=torch.long))


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """The rows of one update over all ranks: numbers of rollouts and numbers of examples."""

    rollouts: list[int]
    examples: list[int]


def rollout_rows(batch: Batch) -> list[TokenRow]:
    """Return rollouts as rows; neither a tool's tokens are learnt nor those whose version is unproven."""
    return [
        TokenRow(
            torch.tensor(list(segment.tokens)),
            segment.prompt_length,
            torch.tensor(list(segment.learnt)).long(),
            number,
        )
        for segment, number in zip(batch.experiences, batch.rollouts, strict=True)
    ]


def example_rows(examples: Iterable[Example]) -> list[TokenRow]:
    return [
        TokenRow(
            torch.tensor(list(example.tokens)),
            example.prompt_length,
            torch.ones(len(example.tokens) - example.prompt_length, dtype=torch.long),
        )
        for example in examples
    ]


def token_row(tokens: Sequence[int]) -> TokenRow:
    return TokenRow(torch.tensor(list(tokens)), 1, torch.ones(len(tokens) - 1, dtype=torch.long))


def check_vocabulary(rows: Iterable[TokenRow], size: int) -> None:
    """Refuse tokens outside the vocabulary: on a GPU they would end the process without a message."""
    largest = max((int(row.tokens.max()) for row in rows), default=0)
    if largest >= size:
        hint = "explorers must use the tokenizer of model.path"
        raise CorruptDataError(f"token {largest} in a batch for a model of {size} tokens", hint=hint)


def split_updates(rollouts: Sequence[TokenRow], examples: Sequence[TokenRow], parts: int) -> list[UpdateRows]:
    """Return the updates of one pass: equal parts of neighbouring rows, whole rollouts, none that teaches nothing."""
    updates, nothing = [], list[int]()
    whole = [list(its) for _, its in groupby(range(len(rollouts)), key=lambda at: _sample(rollouts[at], at))]
    pieces = ([number for index in piece for number in whole[index]] for piece in _pieces(len(whole), parts))
    pairs = zip_longest(pieces, _pieces(len(examples), parts), fillvalue=nothing)
    for left, right in pairs:
        learnt = [number for number in left if rollouts[number].mask.any()]
        part = UpdateRows(left if learnt else [], right)
        if part.rollouts or part.examples:
            updates.append(part)
    return updates


def count_samples(rows: Sequence[TokenRow], numbers: Iterable[int]) -> int:
    """Return how many samples are learnt from; the segments of a rollout count as one."""
    return len({_sample(rows[number], number) for number in numbers if rows[number].mask.any()})


def _sample(row: TokenRow, number: int) -> tuple[bool, int]:
    return (False, number) if row.rollout is None else (True, row.rollout)


def deal(rows: Sequence[TokenRow], numbers: Sequence[int], rank: int, ranks: int) -> Slots:
    """Return the rows of one rank: about as many tokens on each, longest first, and exactly as many rows."""
    order = sorted(numbers, key=lambda number: (-len(rows[number].tokens), number))
    turns = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    own: Slots = []
    for turn, row in enumerate(turns):
        index = rank if turn % 2 == 0 else ranks - 1 - rank
        own.append(row[index] if index < len(row) else None)
    return own


def gather_rows(ranks: Ranks, own: Mapping[int, T]) -> dict[int, T]:
    """Return what all ranks have of their rows, by the row's number, on all ranks."""
    return {number: value for part in ranks.gather(dict(own)) for number, value in part.items()}


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


_POLICY_METRICS = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", *MISMATCH)

_CRITIC_METRICS = ("critic/vf_loss", "critic/vf_clipfrac")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A batch as rows, the updates of one pass over it, and its figures so far."""

    batch: Batch
    rollouts: list[TokenRow]
    examples: list[TokenRow]
    parts: list[UpdateRows]
    figures: StepMetrics

    @property
    def rows(self) -> list[TokenRow]:
        return [*self.rollouts, *self.examples]

    @property
    def horizon(self) -> int:
        """Return the length of the longest response of a rollout, over all its segments."""
        lengths = Counter[int | None]()
        for row in self.rollouts:
            lengths[row.rollout] += len(row.mask)
        return max(lengths.values(), default=1)

    @property
    def masks(self) -> list[torch.Tensor]:
        return [row.mask for row in self.rollouts]

    def updated_lengths(self, epochs: int) -> list[int]:
        """Return the tokens of each row that updates have, as often as they have it."""
        rollouts = [self.rollouts[number] for part in self.parts for number in part.rollouts]
        examples = [self.examples[number] for part in self.parts for number in part.examples]
        return [len(row.tokens) for row in (*rollouts, *examples)] * epochs

    def described(self, algorithm: AlgorithmSection) -> Metrics:
        tokens = {
            "train/tokens": float(sum(int(row.mask.sum()) for row in self.rows)),
            "perf/total_num_tokens": float(sum(len(row.tokens) for row in self.rows)),
        }
        return tokens if algorithm.name == SFT else tokens | batch_metrics(self.batch)


def prepare_step(algorithm: AlgorithmSection, batch: Batch, *, mixed: bool) -> TrainingStep:
    """Return the step of a batch; with `mixed`, examples are expected too, so that each step has their metrics."""
    only_examples = algorithm.name == SFT
    rollouts = [] if only_examples else rollout_rows(batch)
    examples = example_rows(batch.examples)
    if not rollouts and not examples:
        raise UsageError("a batch with nothing to learn from")
    means = () if only_examples else _POLICY_METRICS
    if not only_examples and algorithm.old_logprobs == "recompute":
        means = (*means, *OF_ROLLOUTS)
    if not only_examples and correction(algorithm.options) is not None:
        means = (*means, "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_oob_ratio")
    if algorithm.advantage == GAE:
        means = (*means, *_CRITIC_METRICS)
    if only_examples or mixed or examples:
        means = (*means, "sft/loss")
    tops = () if only_examples else ("rollout_corr/logprob_diff_max",)
    figures = StepMetrics(sums=dict.fromkeys(means, 0.0), tops=dict.fromkeys(tops, 0.0))
    return TrainingStep(
        batch, rollouts, examples, split_updates(rollouts, examples, algorithm.mini_batches), figures
    )


def limits_of(module: torch.nn.Module, text_config: Any, budgets: Iterable[int | None]) -> Limits:
    """Return the limits of a model's rows; `budgets` bound a row by a micro-batch's tokens; None: no bound."""
    bounds = [(budget, "engine.options.max_token_len_per_gpu") for budget in budgets if budget is not None]
    positions = _positions(module, text_config)
    if positions is not None:
        bounds.append((positions, "the model's table of positions"))
    tokens, origin = min(bounds, default=(None, ""))
    return Limits(text_config.vocab_size, tokens, origin)


def _positions(module: torch.nn.Module, text_config: Any) -> int | None:
    """Return how many positions a model has learnt, None without a table of positions."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(part, torch.nn.Embedding):
            length = getattr(text_config, "max_position_embeddings", None)
            return length if isinstance(length, int) else part.num_embeddings
    return None
