"""One experience: a segment of a rollout with its log-probs, its rewards and the versions that produced it."""

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any, NamedTuple, TypeVar

from syncd.errors import UsageError
from syncd.protocol.documents import MAX_INTEGER
from syncd.protocol.version import Pair

MAX_TOKENS = 1 << 20
"""Tokens of one experience, prompt and response together."""

MAX_NAME = 256
"""Characters of a group or task id."""

MAX_INFO = 1 << 16
"""Characters of the free-form info as JSON."""

_INT32 = (1 << 31) - 1
_ROUNDING = 1e-5
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_Item = TypeVar("_Item")


class Span(NamedTuple):
    """Response tokens in a row that one version produced: up to the next span's start, or the response's end."""

    start: int
    generation: int
    step: int


class TurnReward(NamedTuple):
    """The reward of one turn: `end` is the number of response tokens of this segment up to the turn's end."""

    end: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One segment of a rollout, most often the whole rollout; checked when it is made.

    A rollout has several segments where its context was rewritten on the way: each is a row with a prompt and a
    response. All of them have the rollout's group, task, number and reward, and are in one batch, in order.
    Sequences are copied into compact arrays; docs/experience.md says what each field means to the trainer.

    Args:
        tokens: Token ids of the prompt and of the response after it.
        prompt_length: How many of them are the prompt; at least one, and at least one is left for the response.
        logprobs: Log-probability of each response token under the version that produced it.
        action_mask: For each response token, whether the model chose it (not a tool's output, not padding).
        reward: The score of the whole rollout.
        group: The id of the rollouts that are compared with each other; one explorer makes a whole group.
        task: The id of the task.
        rollout: Which rollout of its group this is, from 0.
        segment: Which segment of its rollout this is, from 0.
        segments: How many segments its rollout has.
        generation: Generation of the oldest version that had a part in it.
        step: Step of that version.
        spans: The version of each response token; all are of `generation` and `step` unless given.
        turn_rewards: The reward of each turn; over all segments their sum is `reward`.
        teacher_logprobs: Log-probability of each response token under a teacher.
        unproven: For each response token, whether its version was asserted and not proven; None where nothing was
            to be proven.
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
    segment: int = 0
    segments: int = 1
    generation: int
    step: int
    spans: Sequence[Span] = ()
    turn_rewards: Sequence[TurnReward] | None = None
    teacher_logprobs: Sequence[float] | None = None
    unproven: Sequence[bool] | None = None
    created_at: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Bring the fields into their stored form.

        Raises:
            UsageError: A field is out of its range, or lengths disagree; the message names the field.
        """
        _store(self, "tokens", _packed("tokens", self.tokens, "i"))
        _store(self, "logprobs", _packed("logprobs", self.logprobs, "f"))
        _store(self, "action_mask", _mask("action_mask", self.action_mask))
        _store(self, "reward", _packed("reward", (self.reward,), "f")[0])
        _store(self, "spans", _spans(self))
        if self.teacher_logprobs is not None:
            _store(self, "teacher_logprobs", _packed("teacher_logprobs", self.teacher_logprobs, "f"))
        if self.unproven is not None:
            _store(self, "unproven", _mask("unproven", self.unproven))
        if self.turn_rewards is not None:
            _store(self, "turn_rewards", _items("turn_rewards", self.turn_rewards, _turn_reward))
        _check_lengths(self)
        _check_values(self)
        if len(self.spans) > 1 or self.spans[0] != (0, self.generation, self.step):
            _check_spans(self)
        if self.turn_rewards is not None:
            _check_turns(self.turn_rewards, len(self.logprobs))
            if self.segments == 1:
                check_total((self,))

    @property
    def learnt(self) -> Sequence[bool]:
        """Return for each response token whether it is trained on: the model chose it, and its version is proven.

        Where nothing was to be proven, what the model chose is trained on.
        """
        if self.unproven is None:
            return self.action_mask
        return bytes(map(gt, self.action_mask, self.unproven))  # type: ignore[return-value]  # as masks are stored

    @property
    def versions(self) -> set[Pair]:
        """Return the versions that had a part in it."""
        return {(self.generation, self.step), *((span.generation, span.step) for span in self.spans)}

    @property
    def info_text(self) -> str:
        """Return the info as the JSON text that is stored."""
        return _info_text(self.info)


def check_total(segments: Sequence[Experience]) -> None:
    """Refuse a rollout whose turns have other rewards than the rollout.

    Args:
        segments: All segments of the rollout.

    Raises:
        UsageError: The sums differ by more than rounding, or only some of the segments say rewards of turns.
    """
    told = [one.turn_rewards for one in segments if one.turn_rewards is not None]
    if not told:
        return
    if len(told) < len(segments):
        raise _refusal("some segments of the rollout have turn_rewards and others do not")
    parts, whole = [turn.reward for turns in told for turn in turns], segments[0].reward
    total, size = math.fsum(parts), math.fsum(map(abs, parts)) + abs(whole)
    if abs(total - whole) > _ROUNDING * size:
        raise _refusal(f"turn_rewards add up to {total:g} where the reward is {whole:g}")


_store = object.__setattr__


def _packed(name: str, values: Sequence[Any], code: str) -> "array[Any]":
    if isinstance(values, array) and values.typecode == code:
        return values
    try:
        return array(code, list(values))
    except (TypeError, OverflowError) as error:
        raise _refusal(f"{name} cannot be stored: {error}") from None


def _mask(name: str, values: Sequence[bool]) -> bytes:
    try:
        mask = bytes(values)
    except (TypeError, ValueError) as error:
        raise _refusal(f"{name} cannot be stored: {error}") from None
    if mask.strip(b"\0\1"):
        raise _refusal(f"{name} holds true and false only")
    return mask


def _items(name: str, values: Iterable[Any], make: Callable[..., _Item]) -> tuple[_Item, ...]:
    try:
        return tuple([make(*value) for value in values])
    except (TypeError, OverflowError) as error:
        raise _refusal(f"{name} cannot be stored: {error}") from None


def _spans(experience: Experience) -> tuple[Span, ...]:
    whole = (Span(0, experience.generation, experience.step),)
    if not experience.spans or experience.spans == whole:
        return whole
    return _items("spans", experience.spans, Span)


def _turn_reward(end: int, reward: float) -> TurnReward:
    return TurnReward(end, array("f", (reward,))[0])


def _refusal(what: str) -> UsageError:
    return UsageError(f"not an experience: {what}")


def _check_lengths(experience: Experience) -> None:
    length, prompt = len(experience.tokens), experience.prompt_length
    if length > MAX_TOKENS:
        raise _refusal(f"tokens are {length} where at most {MAX_TOKENS} are taken")
    if type(prompt) is not int or not 0 < prompt < length:
        raise _refusal("prompt_length leaves no prompt or no response")
    _check_length("logprobs", experience.logprobs, length - prompt)
    _check_length("action_mask", experience.action_mask, length - prompt)
    if experience.teacher_logprobs is not None:
        _check_length("teacher_logprobs", experience.teacher_logprobs, length - prompt)
    if experience.unproven is not None:
        _check_length("unproven", experience.unproven, length - prompt)


def _check_length(name: str, values: Sequence[Any], length: int) -> None:
    if len(values) != length:
        raise _refusal(f"{name} has {len(values)} values for a response of {length} tokens")


def _check_values(experience: Experience) -> None:
    if min(experience.tokens) < 0:
        raise _refusal("tokens: an id is negative")
    if not math.isfinite(experience.reward):
        raise _refusal("reward is not finite")
    _check_finite("logprobs", experience.logprobs)
    if experience.teacher_logprobs is not None:
        _check_finite("teacher_logprobs", experience.teacher_logprobs)
    _check_place(experience)
    _check_name("group", experience.group)
    _check_name("task", experience.task)
    if not abs(experience.created_at) <= MAX_INTEGER:
        raise _refusal("created_at is not a time")
    if len(_info_text(experience.info)) > MAX_INFO:
        raise _refusal(f"info is longer than {MAX_INFO} characters")


def _check_place(experience: Experience) -> None:
    _check_integer("rollout", experience.rollout, _INT32)
    _check_integer("segments", experience.segments, _INT32, 1)
    _check_integer("segment", experience.segment, experience.segments - 1)
    _check_integer("generation", experience.generation, MAX_INTEGER)
    _check_integer("step", experience.step, MAX_INTEGER)


def _check_finite(name: str, values: Sequence[float]) -> None:
    # So many 32-bit floats cannot overflow a 64-bit sum, and one that is not finite makes the sum so.
    if not math.isfinite(sum(values)):
        raise _refusal(f"{name}: a value is not finite")


def _check_integer(name: str, value: object, most: int, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= most:
        raise _refusal(f"{name} is not an integer from {least} to {most}")


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise _refusal(f"{name} is not a text of 1 to {MAX_NAME} characters")


def _check_spans(experience: Experience) -> None:
    oldest, before = (experience.generation, experience.step), -1
    for start, generation, step in experience.spans:
        _check_integer("spans: a start", start, _INT32)
        _check_integer("spans: a generation", generation, MAX_INTEGER)
        _check_integer("spans: a step", step, MAX_INTEGER)
        if start <= before:
            raise _refusal("spans do not start one after the other")
        if (generation, step) < oldest:
            raise _refusal("spans: a version is older than generation and step")
        before = start
    if experience.spans[0].start != 0:
        raise _refusal("spans do not start with the response")
    if before >= len(experience.logprobs):
        raise _refusal("spans: one starts behind the response")


def _check_turns(turns: Sequence[TurnReward], length: int) -> None:
    before = 0
    for end, reward in turns:
        _check_integer("turn_rewards: an end", end, _INT32)
        if end <= before:
            raise _refusal("turn_rewards do not end one after the other")
        if not math.isfinite(reward):
            raise _refusal("turn_rewards: a reward is not finite")
        before = end
    if before > length:
        raise _refusal("turn_rewards: one ends behind the response")


def _info_text(info: Mapping[str, Any]) -> str:
    try:
        return _JSON.encode(dict(info))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"info is not JSON: {error}") from None
