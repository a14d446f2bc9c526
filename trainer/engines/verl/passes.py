"""Passes forward without gradients: log-probs and entropies of response tokens."""

from collections.abc import Sequence

import torch

from trainer.engines.verl.batches import Budget, tensors
from trainer.engines.verl.models import Model
from trainer.engines.verl.rows import Row, Slots

Found = dict[int, torch.Tensor]
"""Values of response tokens, float32 in main memory, by the row's number."""


def forward(
    model: Model, rows: Sequence[Row], slots: Slots, temperature: float, *, entropy: bool = False
) -> tuple[Found, Found]:
    """Return log-probs, and entropies where asked for, of this rank's rows; all ranks have as many slots."""
    budget = Budget.inference(model.engine_config)
    data = tensors(rows, slots, {}, budget, temperature=temperature, calculate_entropy=entropy)
    with model.eval_mode():
        output = model.infer_batch(data)["model_output"]
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    found = [_of_rows(output[name], rows, slots) for name in names]
    return found[0], found[1] if entropy else {}


def _of_rows(values: torch.Tensor, rows: Sequence[Row], slots: Slots) -> Found:
    pairs = zip(slots, values.float().cpu().unbind(), strict=False)  # what was padded on comes last
    return {slot: rows[slot].response(value) for slot, value in pairs if slot is not None}
