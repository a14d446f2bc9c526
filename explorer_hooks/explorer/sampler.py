"""Draws tokens from a transformers model, with the exact log-prob of each: one forward pass a token, float32 logits.

`model.generate` is not used: it takes sampling settings from the model directory where a setting equals the
library's default, so that tokens could be drawn from another distribution than the one that is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ENDLESS = 1 << 20


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends and pads sequences.

    Args:
        ends: Token ids that end a text.
        pad: The token id that fills rows; any that the model knows.
        positions: Tokens of prompt and response that the model can hold.
    """

    ends: frozenset[int]
    pad: int
    positions: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """One response: token ids and the natural logarithm of each one's probability."""

    tokens: list[int]
    logprobs: list[float]


def ends_of(model: Any, tokenizer: Any) -> Ends:
    """Return what ends sequences of a model, by its generation configuration, its own, and its tokenizer."""
    config = model.config
    found: set[int] = set()
    for place in (getattr(model, "generation_config", None), config, tokenizer):
        value = getattr(place, "eos_token_id", None)
        found |= (
            set(value) if isinstance(value, list | tuple) else {value} if isinstance(value, int) else set()
        )
    pad, positions = getattr(config, "pad_token_id", None), getattr(config, "max_position_embeddings", None)
    known_pad = isinstance(pad, int) and 0 <= pad < config.vocab_size
    return Ends(
        frozenset(found),
        int(pad) if known_pad and pad is not None else 0,
        positions if isinstance(positions, int) else _ENDLESS,
    )


def draw(
    model: Any,
    ends: Ends,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
    stop: Callable[[], bool],
) -> list[list[Drawn]]:
    """Return `samples` responses to each prompt, all computed as one batch.

    Args:
        model: A causal language model.
        ends: What ends and pads.
        prompts: Token ids, none empty; all shorter than the model's positions.
        samples: Responses to each.
        max_tokens: Tokens of a response at most; fewer where the model's positions run out.
        temperature: What logits are divided by; 0 for the most probable token, whose log-prob is at temperature 1.
        generator: Draws.
        stop: Asked after each token; once true, what there is comes back.
    """
    device = next(model.parameters()).device
    tokens, mask = _padded(prompts, ends.pad, device)
    steps = max(min(max_tokens, ends.positions - tokens.shape[1]), 1)
    chosen, logprobs = [], []
    running = torch.ones(len(prompts) * samples, dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends.ends), dtype=torch.long, device=device)
    with torch.inference_mode():
        made = model(
            tokens, attention_mask=mask, position_ids=_positions(mask), use_cache=True, logits_to_keep=1
        )
        cache, logits = made.past_key_values, made.logits[:, -1].repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask = mask.repeat_interleave(samples, 0)
        for step in range(steps):
            token, logprob = _chosen(logits, temperature, generator)
            chosen.append(token)
            logprobs.append(logprob)
            running &= ~torch.isin(token, last)
            if step + 1 == steps or stop() or not bool(running.any()):
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            made = model(
                token[:, None],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            cache, logits = made.past_key_values, made.logits[:, -1]
    return _grouped(torch.stack(chosen, 1), torch.stack(logprobs, 1), ends.ends, samples)


def _chosen(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and its log-prob for each row."""
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature:
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        token = logprobs.argmax(-1, keepdim=True)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def _padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of one length, filled on the left, and which tokens count."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _grouped(
    tokens: torch.Tensor, logprobs: torch.Tensor, ends: frozenset[int], samples: int
) -> list[list[Drawn]]:
    drawn = []
    for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        length = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        drawn.append(Drawn(row[:length], values[:length]))
    return [drawn[at : at + samples] for at in range(0, len(drawn), samples)]
