"""Rows of tokens as the data of a tinker server: each position has the next token as its target.

A server makes one number of the losses of all tokens in its own way. What `algorithm.loss_agg_mode` asks for goes
into the advantages, by which every policy loss of a server is multiplied: the loss of a token times `a`, a number
that is not negative, is the loss with its advantage times `a`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.engines.verl.rows import TokenRow, count_samples

Values = Mapping[int, torch.Tensor]  # values of the response's tokens, float32, by the row's number


@dataclass(frozen=True, slots=True)
class Column:
    """One named input of a loss: a value for each target."""

    name: str  # its name on the server
    values: torch.Tensor  # the values, int64 or float32, as many as the row has tokens but one


@dataclass(frozen=True, slots=True)
class TinkerRow:
    """One row as a server takes it: the tokens that the model reads, and the inputs of the loss."""

    tokens: tuple[int, ...]
    columns: tuple[Column, ...]


def policy_row(row: TokenRow, advantages: torch.Tensor, old: torch.Tensor) -> TinkerRow:
    """Return a rollout for a policy loss, by scaled advantages and old log-probs of the response's tokens.

    Tokens that are not learnt get the advantage 0; ratios are taken against `old`.
    """
    masked = advantages * row.mask
    return _row(row, Column("logprobs", _placed(row, old)), Column("advantages", _placed(row, masked)))


def example_row(row: TokenRow, weight: float) -> TinkerRow:
    """Return a row for cross entropy, which weighs each learnt token by `weight`."""
    return _row(row, Column("weights", _placed(row, row.mask * weight)))


def example_weights(rows: Sequence[TokenRow], reduction: str) -> list[float]:
    """Return the weight of a learnt token of each row, so that the loss is the mean over rows of their tokens' means.

    A server that takes means by itself divides by the weights too, so that they are 1.
    """
    if reduction == "mean":
        return [1.0] * len(rows)
    return [1 / (max(int(row.mask.sum()), 1) * len(rows)) for row in rows]


def row_scales(
    rows: Sequence[TokenRow], numbers: Sequence[int], mode: str, horizon: int, reduction: str
) -> dict[int, float]:
    """Return the factor of each row's losses with which the server's own sum is the loss of `mode`.

    Args:
        numbers: Those of this update; each has a learnt token.
        horizon: What `seq-mean-token-sum-norm` divides by.
        reduction: What the server does: `mean`, over all positions of each row and then over rows; `sum`.
    """
    learnt = {number: int(rows[number].mask.sum()) for number in numbers}
    samples, tokens = count_samples(rows, numbers), sum(learnt.values())
    divisors = {
        "token-mean": dict.fromkeys(numbers, tokens),
        "token-sum": dict.fromkeys(numbers, 1),
        "seq-mean-token-sum": dict.fromkeys(numbers, samples),
        "seq-mean-token-sum-norm": dict.fromkeys(numbers, samples * horizon),
        "seq-mean-token-mean": {number: samples * count for number, count in learnt.items()},
    }[mode]
    undone = {number: (len(rows[number].tokens) - 1) * len(numbers) for number in numbers}
    return {number: (undone[number] if reduction == "mean" else 1) / divisors[number] for number in numbers}


def _row(row: TokenRow, *columns: Column) -> TinkerRow:
    targets = Column("target_tokens", row.tokens[1:])
    return TinkerRow(tuple(row.tokens[:-1].tolist()), (targets, *columns))


def _placed(row: TokenRow, values: torch.Tensor) -> torch.Tensor:
    """Return values of the response's tokens as values of all targets, 0 before them."""
    placed = torch.zeros(len(row.tokens) - 1)
    placed[row.prompt - 1 :] = values.float()
    return placed
