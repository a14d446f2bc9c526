"""The trainer's side of a probe: the fixed tokens of a job, and the record of what the model answers to them."""

import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from syncd.errors import ConfigError, NonFiniteError
from syncd.protocol.probe import Probe
from trainer.sampling import load_tokenizer
from trainer.whole_models import whole_models

TEXTS = (
    "The harbour was quiet before dawn, and only the gulls on the old pier noticed the small grey boat.",
    "def mean(values):\n    total = sum(values)\n    return total / len(values) if values else 0.0\n",
    "In 1997 the bridge carried 41,250 cars a day; by 2024 it carried 63,800, which is 54.7 percent more.",
    "Question: a train leaves at 9:40 and arrives at 12:05. How long is the journey? Answer: 2 h 25 min.",
)
"""Ordinary text, code and numbers: random tokens would say more about noise than about the weights."""

LENGTH = 16
"""Tokens of a sequence: four of them cost a trainer one small forward pass, and show every fault that is known."""

_LEAST = 2
_DIFFERENT = 12
_STRIDE = 37

Tokens = tuple[tuple[int, ...], ...]


def probe_tokens(
    model: str, vocabulary: int | None, limit: int | None = None, *, trust: bool = False
) -> Tokens:
    """Return the sequences of a model's probe, the same at each call; none if its vocabulary is unknown.

    They are the beginnings of `TEXTS`. If the model directory has no tokenizer, or one that is not made for text such
    as this, they are ids at equal distances over the vocabulary, in a fixed order.

    Args:
        vocabulary: Token ids are below this; None if it is not known.
        limit: Tokens of the longest row that the model takes; None for no bound.
        trust: Whether code that comes with the tokenizer may run.
    """
    length = LENGTH if limit is None else min(LENGTH, limit)
    if not vocabulary or length < _LEAST:
        return ()
    rows = _texts_as_tokens(model, length, trust=trust)
    flat = [token for row in rows for token in row]
    is_usable = len(set(flat)) >= _DIFFERENT and max(flat) < vocabulary and min(map(len, rows)) >= _LEAST
    return rows if is_usable else _spread(vocabulary, length)


_tokens_of = functools.cache(probe_tokens)


def make_probe(
    tokens: Tokens, logprobs: Sequence[Sequence[float]], compute_dtype: str, export_dtype: str
) -> Probe | None:
    """Return the record of what a model answers; None if a log-prob is not finite."""
    if not all(math.isfinite(value) for row in logprobs for value in row):
        return None
    return Probe(tokens, tuple(map(tuple, logprobs)), compute_dtype, export_dtype)


def non_finite_error(weights: Iterable[tuple[str, torch.Tensor]]) -> NonFiniteError:
    """Return the error for a model whose answer is not finite, with the first of its weights that is not, if any."""
    # To the end of the walk, which may gather each tensor from all ranks.
    names = [name for name, tensor in weights if not tensor.float().isfinite().all()]
    reason = f"tensor {names[0]} is not finite" if names else "its weights are, so its outputs overflow"
    return NonFiniteError(
        f"the model's log-probs are not finite: {reason}",
        hint="resume from an earlier checkpoint with a lower algorithm.optimizer.lr",
    )


def probe_directory(directory: str, compute_dtype: str, *, trust: bool = False) -> Probe:
    """Return the probe of a Hugging Face model directory, computed by transformers on the processor.

    Args:
        directory: The directory; its weights are safetensors.
        compute_dtype: What the forward pass computes in. The weights are published as they are in the directory.
        trust: Whether code that comes with the model may run.
    """
    return probe_model(_load_model(directory, compute_dtype, trust=trust), directory, trust=trust)


def probe_model(model: Any, directory: str, *, trust: bool = False) -> Probe:
    """Return the probe of a transformers model in this process, as it is now, for `Client.publish`.

    Examples:
        A training loop of your own:

            client.publish(model.state_dict(), step, probe=probe_model(model, directory))

    Args:
        model: What `from_pretrained` returned; whether it is in training mode stays as it is.
        directory: The model's directory or name; its tokenizer makes the tokens.
        trust: Whether code that comes with the tokenizer may run.
    """
    tokens = _tokens_of(directory, model.config.get_text_config().vocab_size, trust=trust)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        answers = [
            _answer(model(torch.tensor([row], device=model.device)).logits[0].cpu(), row) for row in tokens
        ]
    model.train(was_training)
    probe = make_probe(tokens, answers, str(model.dtype).removeprefix("torch."), "keep")
    if probe is None:
        raise non_finite_error(model.state_dict().items())
    return probe


def _load_model(directory: str, dtype: str, *, trust: bool) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds; the trainer's engine has its own
    from transformers.utils import logging  # noqa: PLC0415

    if not os.path.isfile(f"{directory}/config.json"):
        raise ConfigError("not a Hugging Face model directory: it has no config.json", path=directory)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = {"dtype": getattr(torch, dtype), "trust_remote_code": trust, "use_safetensors": True}
    try:
        with whole_models():
            model: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    except Exception as error:  # whatever transformers, safetensors and a model's own code raise
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(f"the model cannot be loaded: {text}", path=directory) from error
    return model.eval()


def _answer(logits: torch.Tensor, tokens: tuple[int, ...]) -> list[float]:
    chosen = torch.tensor(tokens[1:])[:, None]
    logprobs: list[float] = logits[:-1].float().log_softmax(-1).gather(-1, chosen)[:, 0].tolist()
    return logprobs


def _texts_as_tokens(model: str, length: int, *, trust: bool) -> Tokens:
    """Return the beginnings of the texts by a model's tokenizer; empty sequences if none can be loaded."""
    try:
        tokenizer = load_tokenizer(model, trust=trust)
        return tuple(tuple(map(int, tokenizer.encode(text)[:length])) for text in TEXTS)
    except Exception:  # noqa: BLE001 -- whatever a tokenizer raises, ids do as well
        return ((),)


def _spread(vocabulary: int, length: int) -> Tokens:
    count = len(TEXTS) * LENGTH
    ids = [index * _STRIDE % count * vocabulary // count for index in range(count)]
    return tuple(tuple(ids[row * LENGTH :][:length]) for row in range(len(TEXTS)))
