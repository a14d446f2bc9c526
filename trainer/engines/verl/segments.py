"""What a rollout has once, however many segments it is cut into: its share of a mean, and ratios of all its tokens.

The segments of a rollout are rows of one update, but of different micro-batches and ranks. Needs no verl.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from syncd.jobfile.trainer_sections import AlgorithmSection
from syncd.transports.ranks import Ranks
from trainer.engines.verl.figures import measure_difference, measure_rollouts
from trainer.engines.verl.rows import RowTensors, TokenRow, TrainingStep, gather_rows


def shares(rows: Sequence[TokenRow]) -> list[float]:
    """Return which part of the learnt tokens of its rollout each row has; 1 where the rollout has no other row.

    A mean over a row's tokens times its share, added up over the segments, is the mean over the rollout's tokens.
    """
    counts = [int(row.mask.sum()) for row in rows]
    whole = Counter[int | None]()
    for row, count in zip(rows, counts, strict=True):
        whole[row.rollout] += count
    return [
        count / whole[row.rollout] if row.rollout is not None and count < whole[row.rollout] else 1.0
        for row, count in zip(rows, counts, strict=True)
    ]


def is_mean_of_rollouts(algorithm: AlgorithmSection) -> bool:
    """Return whether losses are means over the tokens of each rollout; verl's sapo knows no other mode."""
    return algorithm.loss_agg_mode == "seq-mean-token-mean" or algorithm.loss == "sapo"


def with_shares(rows: Sequence[TokenRow], columns: Mapping[str, RowTensors]) -> dict[str, RowTensors]:
    """Return columns with which verl's mean over each row becomes that over its rollout.

    verl multiplies the loss of each token by `rollout_is_weights`, whatever the loss is. `columns` has those that
    there are, with `old_log_probs` of this rank's rows.
    """
    share_of_row = shares(rows)
    expanded = {
        number: torch.full_like(old, share_of_row[number]) for number, old in columns["old_log_probs"].items()
    }
    weights = columns.get("rollout_is_weights")
    products = (
        expanded if weights is None else {index: weights[index] * share for index, share in expanded.items()}
    )
    return {"segment_shares": expanded, "rollout_is_weights": products}


def by_share(
    algorithm: AlgorithmSection, rows: Sequence[TokenRow], advantages: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return advantages with which a mean over each row becomes that over its rollout; for losses without weights.

    A loss whose advantage is multiplied by a number above 0 is that loss times the number, but for penalties.
    """
    if not is_mean_of_rollouts(algorithm):
        return advantages
    return [values * share for values, share in zip(advantages, shares(rows), strict=True)]


def are_cut(rows: Sequence[TokenRow]) -> bool:
    return len({row.rollout for row in rows}) < len(rows)


def sums_of_rollouts(ranks: Ranks, rows: Sequence[TokenRow], own: Mapping[int, float]) -> dict[int, float]:
    """Return for each row the sum of its rollout's rows, from the numbers of the rows that each rank has."""
    sums = gather_rows(ranks, own)
    totals = Counter[int | None]()
    for number, value in sums.items():
        totals[rows[number].rollout] += value  # type: ignore[assignment]  # Counter adds floats too
    return {number: float(totals[rows[number].rollout]) for number in sums}


def once_a_rollout(rows: Sequence[TokenRow], values: Mapping[int, float]) -> list[float]:
    """Return values of rollouts, each once, from those of their rows; none of rollouts without a learnt token."""
    learnt = (number for number in values if rows[number].mask.any())
    return list({rows[number].rollout: values[number] for number in learnt}.values())


def log_ratio_sums(rows: Sequence[TokenRow], first: RowTensors, other: RowTensors) -> dict[int, float]:
    """Return for each row of `first` the sum of its log-probs less those of `other`, over the learnt tokens."""
    return {
        number: float(((values.double() - other[number].double()) * rows[number].mask).sum())
        for number, values in first.items()
    }


def measure_mismatch(
    ranks: Ranks, step: TrainingStep, own: RowTensors, recorded: RowTensors
) -> dict[int, float]:
    """Record how far this model is from explorers; return for each row the sum of log-ratios over its rollout.

    `own` has this model's log-probs before the updates, of this rank's rows; `recorded` explorers', of all rows.
    """
    rows = step.rollouts
    for number, values in own.items():
        measure_difference(step.figures, values, recorded[number], rows[number].mask)
    whole = sums_of_rollouts(ranks, rows, log_ratio_sums(rows, own, recorded))
    measure_rollouts(step.figures, once_a_rollout(rows, whole))
    return whole


def with_ratio_of_rollouts(
    ranks: Ranks, rows: Sequence[TokenRow], old: RowTensors, now: RowTensors
) -> RowTensors:
    """Return old log-probs against which the mean log-ratio of each segment is that of its whole rollout.

    GSPO's ratio of a row is the exponential of that mean. All tokens of a row move by the same number, and over the
    learnt tokens of a rollout these numbers add up to 0. `now` has this rank's rows of the update.
    """
    apart = log_ratio_sums(rows, now, old)
    whole = sums_of_rollouts(ranks, rows, apart)
    counts = {number: int(rows[number].mask.sum()) for number in now}
    tokens = sums_of_rollouts(ranks, rows, counts)
    return old | {
        number: old[number]
        + (apart[number] / max(counts[number], 1) - whole[number] / max(tokens[number], 1))
        for number in now
    }
