"""One experience: a segment of a rollout with its log-probs, its rewards and the versions that produced it."""

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import gt
from typing import Any, NamedTuple

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
        unproven: For each response token, whether it may come from weights that the engine has not proven to be those
            of a version; None if no token does.
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
        try:
            for name, stored in _STORED.items():
                value = getattr(self, name)
                if value is not None or name not in _OPTIONAL:
                    object.__setattr__(self, name, stored(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise _refusal(f"{name} cannot be stored: {error}") from None
        if not self.spans:
            object.__setattr__(self, "spans", (Span(0, self.generation, self.step),))
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
        """Return for each response token whether it is trained on: the model chose it, and it is not unproven."""
        if self.unproven is None:
            return self.action_mask
        return bytes(map(gt, self.action_mask, self.unproven))  # type: ignore[return-value]  # as masks are stored

    @property
    def doubted(self) -> int:
        """Return how many tokens the model chose that are not trained on, because they are unproven."""
        return 0 if self.unproven is None else sum(self.action_mask) - sum(self.learnt)

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
    rewards = [segment.turn_rewards for segment in segments if segment.turn_rewards is not None]
    if not rewards:
        return
    if len(rewards) < len(segments):
        raise _refusal("some segments of the rollout have turn_rewards and others do not")
    parts, whole = [turn.reward for turns in rewards for turn in turns], segments[0].reward
    total, size = math.fsum(parts), math.fsum(map(abs, parts)) + abs(whole)
    if abs(total - whole) > _ROUNDING * size:
        raise _refusal(f"turn_rewards add up to {total:g} where the reward is {whole:g}")


def _packed(code: str, values: Sequence[Any]) -> "array[Any]":
    return values if isinstance(values, array) and values.typecode == code else array(code, list(values))


def _single(number: float) -> float:
    return array("f", (number,))[0]


_STORED: Mapping[str, Callable[[Any], Any]] = {
    "tokens": partial(_packed, "i"),
    "logprobs": partial(_packed, "f"),
    "action_mask": bytes,
    "reward": _single,
    "spans": lambda spans: tuple([Span(*span) for span in spans]),
    "teacher_logprobs": partial(_packed, "f"),
    "unproven": bytes,
    "turn_rewards": lambda turns: tuple([TurnReward(end, _single(reward)) for end, reward in turns]),
}
"""The stored form of each field that has another one than that in which it may be given."""

_OPTIONAL = ("teacher_logprobs", "unproven", "turn_rewards")


def _refusal(what: str) -> UsageError:
    return UsageError(f"not an experience: {what}")


def _check_lengths(experience: Experience) -> None:
    length, prompt = len(experience.tokens), experience.prompt_length
    if length > MAX_TOKENS:
        raise _refusal(f"tokens are {length} where at most {MAX_TOKENS} are accepted")
    if type(prompt) is not int or not 0 < prompt < length:
        raise _refusal("prompt_length leaves no prompt or no response")
    length -= prompt
    for name, values in _given(experience, "logprobs", "action_mask", "teacher_logprobs", "unproven"):
        if len(values) != length:
            raise _refusal(f"{name} has {len(values)} values for a response of {length} tokens")


def _given(experience: Experience, *names: str) -> list[tuple[str, Any]]:
    """Return those of the fields that are not None."""
    return [(name, values) for name in names if (values := getattr(experience, name)) is not None]


def _check_values(experience: Experience) -> None:
    if min(experience.tokens) < 0:
        raise _refusal("tokens: an id is negative")
    if not math.isfinite(experience.reward):
        raise _refusal("reward is not finite")
    for name, mask in _given(experience, "action_mask", "unproven"):
        if mask.strip(b"\0\1"):
            raise _refusal(f"{name} holds true and false only")
    for name, values in _given(experience, "logprobs", "teacher_logprobs"):
        # So many 32-bit floats cannot overflow a 64-bit sum, and one that is not finite makes the sum so.
        if not math.isfinite(sum(values)):
            raise _refusal(f"{name}: a value is not finite")
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
