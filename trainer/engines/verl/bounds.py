"""What the model that was built can take of a row."""

from collections.abc import Iterable
from typing import Any

import torch

from trainer.experience.limits import Limits

_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
"""What models of transformers call a table of learnt positions. Rotary positions have no table and no end."""


def limits_of(module: torch.nn.Module, text_config: Any, budgets: Iterable[int | None]) -> Limits:
    """Return the bounds of a model.

    Args:
        module: The model.
        text_config: Its configuration, that of the text part where there are several.
        budgets: Tokens of a micro-batch, which no row may exceed; None for no bound.
    """
    bounds = [(budget, "engine.options.max_token_len_per_gpu") for budget in budgets if budget is not None]
    positions = _positions(module, text_config)
    if positions is not None:
        bounds.append((positions, "the model's table of positions"))
    tokens, origin = min(bounds, default=(None, ""))
    return Limits(text_config.vocab_size, tokens, origin)


def _positions(module: torch.nn.Module, text_config: Any) -> int | None:
    """Return how many positions a model has learnt, None where its positions have no table."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(part, torch.nn.Embedding):
            known = getattr(text_config, "max_position_embeddings", None)
            return known if isinstance(known, int) else part.num_embeddings
    return None
