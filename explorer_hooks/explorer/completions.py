"""The completions API of vLLM and SGLang: token ids in, token ids and their log-probs out.

`POST /v1/completions` with `return_token_ids` and `logprobs = 0`. Every sampling setting is sent, because servers
take those that are missing from the model directory, and the log-probs would be of another distribution.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from explorer_hooks.explorer.generation import Ask, Rollout

PATH = "/v1/completions"

_FINISHED = frozenset({"stop", "length"})


class MalformedError(Exception):
    """An answer is not what a server that works says; another attempt may get one."""


class LackingError(Exception):
    """The server cannot say what is needed; no further attempt will change that."""


def request(ask: Ask, model: str) -> dict[str, Any]:
    """Return the body of a request for one group."""
    return {
        "model": model,
        "prompt": list(ask.prompt),
        "n": ask.samples,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def rollouts(answer: Mapping[str, Any] | None, ask: Ask) -> tuple[Rollout, ...]:
    """Return the rollouts of an answer.

    Raises:
        MalformedError: It is not a whole group of finished responses with a log-prob for each token.
        LackingError: It names no token ids, or was made for another prompt.
    """
    choices = (answer or {}).get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedError("the answer has no choices")
    if len(choices) != ask.samples:
        raise MalformedError(f"{len(choices)} choices where {ask.samples} were asked for")
    return tuple(_rollout(choice, ask) for choice in choices)


def _rollout(choice: Mapping[str, Any], ask: Ask) -> Rollout:
    reason = choice.get("finish_reason")
    if reason not in _FINISHED:
        raise MalformedError(f"a response ended with {reason!r}")
    tokens, values = choice.get("token_ids"), _logprobs(choice)
    if tokens is None:
        raise LackingError("the server does not return token ids: vLLM 0.16 and SGLang 0.5.23 do")
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != list(ask.prompt):
        raise LackingError("the server has changed the prompt")
    if not _are(tokens, int) or min(tokens) < 0:
        raise MalformedError("token_ids is not a list of token ids")
    if len(values) != len(tokens) or len(tokens) > ask.max_tokens:
        raise MalformedError(f"{len(values)} log-probs for {len(tokens)} tokens, of {ask.max_tokens} at most")
    return Rollout(tokens, values, str(choice.get("text") or ""))


def _logprobs(choice: Mapping[str, Any]) -> Sequence[float]:
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or not all(_is_logprob(value) for value in values):
        raise MalformedError("token_logprobs is not a list of log-probs")
    return values


def _is_logprob(value: object) -> bool:
    # Kernels round: the log of a probability of one may come out a little above zero.
    return type(value) in (int, float) and math.isfinite(value) and value < 1.0  # type: ignore[arg-type, operator]


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)
