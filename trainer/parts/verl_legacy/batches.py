"""Rows as verl 0.7.1's worker takes them: padded tensors, prompts to the left, responses to the right."""

from collections.abc import Sequence
from typing import Any

import torch
from verl.protocol import DataProto

from trainer.engines.verl.rows import PADDING, Columns, RowTensors, Slots, TokenRow, fill
from trainer.parts.verl_legacy.worker import LegacyModel


def padded(rows: Sequence[TokenRow], slots: Slots, columns: Columns, **settings: Any) -> Any:
    """Return the rows of this rank for one pass as verl's DataProto; a slot of None is a row that teaches nothing."""
    chosen = [PADDING if slot is None else rows[slot] for slot in slots]
    prompt = max(row.prompt for row in chosen)
    length = max(len(row.mask) for row in chosen)
    tokens = _placed([row.tokens for row in chosen], prompt + length, [prompt - row.prompt for row in chosen])
    there = [torch.ones_like(row.tokens) for row in chosen]
    attention = _placed(there, prompt + length, [prompt - row.prompt for row in chosen])
    tensors = {
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": tokens[:, prompt:],
        "response_mask": _placed([row.mask for row in chosen], length),
    }
    for name, column in columns.items():
        values = [torch.zeros(1) if slot is None else column[slot] for slot in slots]
        tensors[name] = _placed(values, length)
    return DataProto.from_dict(
        tensors=tensors, meta_info={"pad_token_id": 0, "use_dynamic_bsz": False, **settings}
    )


def _placed(values: Sequence[torch.Tensor], width: int, starts: Sequence[int] | None = None) -> torch.Tensor:
    """Return rows of one width, zero where a value does not reach."""
    whole = torch.zeros(len(values), width, dtype=values[0].dtype)
    for number, value in enumerate(values):
        start = starts[number] if starts is not None else 0
        whole[number, start : start + len(value)] = value
    return whole


def forward(
    model: LegacyModel,
    rows: Sequence[TokenRow],
    slots: Slots,
    size: int,
    temperature: float,
    *,
    entropy: bool = False,
) -> tuple[RowTensors, RowTensors]:
    """Return log-probs, and entropies if asked for, of this rank's rows; all ranks have as many slots.

    A micro-batch has at most `size` rows.
    """
    slots, size = fill(slots, size)
    data = padded(rows, slots, {}, temperature=temperature, micro_batch_size=size)
    output = model.actor.compute_log_prob(data, calculate_entropy=entropy)
    outputs = [_of_rows(output[name], rows, slots) for name in ("log_probs", "entropys")[: 1 + entropy]]
    return outputs[0], outputs[1] if entropy else {}


def _of_rows(values: torch.Tensor, rows: Sequence[TokenRow], slots: Slots) -> RowTensors:
    pairs = zip(slots, values.float().cpu(), strict=True)
    return {slot: value[: len(rows[slot].mask)] for slot, value in pairs if slot is not None}
