"""What a model in this process answers to rows of tokens. Needs torch."""

from collections.abc import Sequence

import torch


def log_probs_of(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    """Return the log-prob of each token after the first of its row; rows of one length are one batch."""
    device = next(model.parameters()).device
    log_probs: list[tuple[float, ...]] = [()] * len(rows)
    for length in {len(row) for row in rows}:
        places = [at for at, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([list(rows[at]) for at in places], device=device)
        output = model(ids)
        logits = getattr(output, "logits", output)[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(logits.device))[..., 0]
        for at, values in zip(places, chosen.tolist(), strict=True):
            log_probs[at] = tuple(values)
    return tuple(log_probs)
