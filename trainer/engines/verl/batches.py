"""Rows as verl takes them: a TensorDict of jagged tensors with the settings of a pass beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig

from syncd.errors import ConfigError
from trainer.engines.verl.rows import PADDING, Columns, Row, Slots, fill


@dataclass(frozen=True, slots=True)
class Budget:
    """How much goes into one micro-batch: rows, or tokens where that is asked for."""

    rows: int
    tokens: int | None

    @classmethod
    def training(cls, config: FSDPEngineConfig) -> "Budget":
        """Return that of passes forward and backward."""
        tokens = config.max_token_len_per_gpu if config.use_dynamic_bsz else None
        return cls(config.micro_batch_size_per_gpu, tokens)

    @classmethod
    def inference(cls, config: FSDPEngineConfig) -> "Budget":
        """Return that of passes without gradients."""
        tokens = config.infer_max_token_len_per_gpu or config.max_token_len_per_gpu
        return cls(config.infer_micro_batch_size_per_gpu, tokens if config.use_dynamic_bsz else None)

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse rows that fit into no micro-batch.

        Raises:
            ConfigError: There is one.
        """
        longest = max((len(row.tokens) for row in rows), default=0)
        if self.tokens is not None and longest > self.tokens:
            hint = "raise engine.options.max_token_len_per_gpu"
            raise ConfigError(f"a row of {longest} tokens where {self.tokens} are one micro-batch", hint=hint)


def tensors(
    rows: Sequence[Row], slots: Slots, columns: Columns, budget: Budget, **settings: Any
) -> TensorDict:
    """Return the rows of this rank for one pass.

    Args:
        rows: All rows of the batch.
        slots: Which of them; padded here to whole micro-batches.
        columns: What the loss needs of each response token besides.
        budget: What goes into a micro-batch.
        settings: Of the pass, by verl's names.
    """
    slots, size = fill(slots, budget.rows)
    chosen = [PADDING if slot is None else rows[slot] for slot in slots]
    found = {
        "input_ids": [row.tokens for row in chosen],
        "position_ids": [torch.arange(len(row.tokens)) for row in chosen],
        "prompts": [row.tokens[: row.prompt] for row in chosen],
        "responses": [row.tokens[row.prompt :] for row in chosen],
        "response_mask": [row.mask for row in chosen],
        "loss_mask": [torch.cat([torch.zeros(row.prompt, dtype=torch.long), row.mask]) for row in chosen],
    } | {
        name: [column[slot] if slot is not None else torch.zeros(1) for slot in slots]
        for name, column in columns.items()
    }
    data = TensorDict({name: _jagged(values) for name, values in found.items()}, batch_size=[len(slots)])
    return tu.assign_non_tensor(
        data, use_remove_padding=False, pad_token_id=0, use_dynamic_bsz=budget.tokens is not None,
        max_token_len_per_gpu=budget.tokens, micro_batch_size_per_gpu=size, **settings,
    )  # fmt: skip


def _jagged(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
