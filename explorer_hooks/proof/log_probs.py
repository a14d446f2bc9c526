"""What a model in this process answers to rows of tokens. Needs torch."""

from collections.abc import Sequence

import torch


def log_probs_of(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    """Return the log-prob of each token after the first of its row, by one forward pass.

    Shorter rows are filled up at their end, which no token before it sees.
    """
    longest, device = max(map(len, rows)), next(model.parameters()).device
    ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device)
    output = model(ids)
    logits = getattr(output, "logits", output)[:, :-1].float()
    following = ids[:, 1:, None].to(logits.device)
    log_probs = (logits.gather(-1, following) - logits.logsumexp(-1, keepdim=True))[..., 0].tolist()
    return tuple(tuple(values[: len(row) - 1]) for values, row in zip(log_probs, rows, strict=True))
