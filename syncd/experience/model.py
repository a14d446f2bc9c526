"""One experience: a rollout with its log-probs, its reward and the version that produced it."""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncd.errors import UsageError
from syncd.protocol.documents import MAX_INTEGER

MAX_TOKENS = 1 << 20
"""Tokens of one experience, prompt and response together."""

MAX_NAME = 256
"""Characters of a group or task id."""

MAX_INFO = 1 << 16
"""Characters of the free-form info as JSON."""

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One rollout, checked when it is made; sequences are copied into compact arrays.

    Args:
        tokens: Token ids of the prompt and of the response after it.
        prompt_length: How many of them are the prompt; at least one, and at least one is left for the response.
        logprobs: Log-probability of each response token under the version that produced it.
        action_mask: For each response token, whether the model chose it (not a tool's output, not padding).
        reward: The score of the rollout.
        group: The id of the rollouts that are compared with each other; one explorer makes a whole group.
        task: The id of the task.
        rollout: Which rollout of its group this is, from 0.
        generation: Generation of the version that produced it.
        step: Step of the oldest version that produced it.
        token_steps: For each response token the step that produced it, where versions changed on the way.
        created_at: Seconds since the epoch on the explorer's clock, for people to read.
        info: Anything else, as JSON.
    """

    tokens: Sequence[int]
    prompt_length: int
    logprobs: Sequence[float]
    action_mask: Sequence[bool]
    reward: float
    group: str
    task: str
    rollout: int
    generation: int
    step: int
    token_steps: Sequence[int] | None = None
    created_at: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Bring the fields into their stored form.

        Raises:
            UsageError: A field is out of its range, or lengths disagree.
        """
        for name, code in (("tokens", "i"), ("logprobs", "f")):
            object.__setattr__(self, name, _packed(name, getattr(self, name), code))
        object.__setattr__(self, "action_mask", _mask(self.action_mask))
        if self.token_steps is not None:
            object.__setattr__(self, "token_steps", _packed("token_steps", self.token_steps, "q"))
        object.__setattr__(self, "reward", _packed("reward", (self.reward,), "f")[0])
        _check_lengths(self)
        _check_values(self)

    @property
    def oldest_step(self) -> int:
        """Return the step of the oldest version that had a part in it."""
        return min(self.step, *self.token_steps) if self.token_steps else self.step

    @property
    def info_text(self) -> str:
        """Return the info as the JSON text that is stored."""
        return _info_text(self.info)


def _packed(name: str, values: Sequence[Any], code: str) -> "array[Any]":
    if isinstance(values, array) and values.typecode == code:
        return values
    try:
        return array(code, list(values))
    except (TypeError, OverflowError) as error:
        raise UsageError(f"{name} of an experience cannot be stored: {error}") from None


def _mask(values: Sequence[bool]) -> bytes:
    try:
        mask = bytes(values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"action_mask of an experience cannot be stored: {error}") from None
    _require(not mask.strip(b"\0\1"), "action_mask holds true and false only")
    return mask


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 -- it reads as a sentence
    if not holds:
        raise UsageError(f"not an experience: {what}")


def _check_lengths(experience: Experience) -> None:
    length, prompt = len(experience.tokens), experience.prompt_length
    _require(length <= MAX_TOKENS, f"{length} tokens where at most {MAX_TOKENS} are taken")
    _require(type(prompt) is int and 0 < prompt < length, "prompt_length leaves no prompt or no response")
    for name in ("logprobs", "action_mask", "token_steps"):
        values = getattr(experience, name)
        _require(values is None or len(values) == length - prompt, f"{name} is not as long as the response")


def _check_values(experience: Experience) -> None:
    _require(min(experience.tokens) >= 0, "a token id is negative")
    _require(math.isfinite(experience.reward), "reward is not finite")
    _require(all(map(math.isfinite, experience.logprobs)), "a log-prob is not finite")
    _require(min(experience.token_steps or (0,)) >= 0, "a token's step is negative")
    for name, most in (("rollout", _INT32), ("generation", MAX_INTEGER), ("step", MAX_INTEGER)):
        value = getattr(experience, name)
        _require(type(value) is int and 0 <= value <= most, f"{name} is not an integer from 0 to {most}")
    for name in ("group", "task"):
        _require(_is_name(getattr(experience, name)), f"{name} is not a text of 1 to {MAX_NAME} characters")
    _require(abs(experience.created_at) <= MAX_INTEGER, "created_at is not a time")
    _require(len(_info_text(experience.info)) <= MAX_INFO, f"info is longer than {MAX_INFO} characters")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _info_text(info: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(info), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"info of an experience is not JSON: {error}") from None
