"""The trainer's side of a probe: the fixed tokens of a job, and the record of what the model answers to them."""

import math
from collections.abc import Sequence

from syncd.errors import NonFiniteError
from syncd.protocol.probe import Probe
from trainer.sampling import load_tokenizer

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
        model: The model directory.
        vocabulary: Token ids are below this; None if it is not known.
        limit: Tokens of the longest row that the model takes; None for no bound.
        trust: Whether code that comes with the tokenizer may run.
    """
    length = LENGTH if limit is None else min(LENGTH, limit)
    if not vocabulary or length < _LEAST:
        return ()
    found = _texts_as_tokens(model, length, trust=trust)
    flat = [token for row in found for token in row]
    is_usable = len(set(flat)) >= _DIFFERENT and max(flat) < vocabulary and min(map(len, found)) >= _LEAST
    return found if is_usable else _spread(vocabulary, length)


def make_probe(
    tokens: Tokens,
    logprobs: Sequence[Sequence[float]],
    compute_dtype: str,
    export_dtype: str,
    *,
    check_finite: bool,
) -> Probe | None:
    """Return the record of what a model answers; None if a log-prob is not finite.

    Raises:
        NonFiniteError: A log-prob is not finite, and `check_finite` is set.
    """
    if all(math.isfinite(value) for row in logprobs for value in row):
        return Probe(tokens, tuple(map(tuple, logprobs)), compute_dtype, export_dtype)
    if check_finite:
        raise NonFiniteError(
            "the model's log-probs of the probe are not finite: its weights are not, or its outputs overflow",
            hint="resume from an earlier checkpoint with a lower algorithm.optimizer.lr",
        )
    return None


def _texts_as_tokens(model: str, length: int, *, trust: bool) -> Tokens:
    """Return the beginnings of the texts by a model's tokenizer; empty sequences if none can be loaded."""
    try:
        tokenizer = load_tokenizer(model, trust=trust)
        return tuple(tuple(map(int, tokenizer.encode(text)[:length])) for text in TEXTS)
    except Exception:  # noqa: BLE001 -- whatever a tokenizer raises, ids do as well
        return ((),)


def _spread(vocabulary: int, length: int) -> Tokens:
    count = len(TEXTS) * LENGTH
    ids = [place * _STRIDE % count * vocabulary // count for place in range(count)]
    return tuple(tuple(ids[row * LENGTH :][:length]) for row in range(len(TEXTS)))
