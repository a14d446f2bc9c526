"""What drivers ask for, read from the bodies of their requests, and what they are told."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer_hooks.parts.agents.api_errors import refused
from explorer_hooks.parts.agents.sessions import Session
from syncd.experience.model import MAX_INFO, MAX_NAME

MOST_REWARD = 1e18  # the largest reward that trainers take
MOST_INFO = MAX_INFO // 2  # characters of a reward's info as JSON

_MOST_ATTEMPTS = 1 << 16

_ROUNDING = 5e-6
"""By which rewards of turns may differ from their sum, in parts of their size; batches take twice as much."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    group: str  # the group of the rollout, by any name
    task: str
    rollout: int  # which rollout of the group
    attempt: int  # which attempt at it; a later one abandons those before

    @classmethod
    def read(cls, body: object, group_size: int) -> "SessionRequest":
        fields = body if isinstance(body, dict) else {}
        unknown = set(fields) - {"group", "task", "rollout", "attempt"}
        if unknown:
            raise refused(f"{min(map(str, unknown))[:80]} is not a field of a session")
        group, task = fields.get("group"), fields.get("task")
        for name, value in (("group", group), ("task", task)):
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME // 2 or not value.isprintable():
                raise refused(f"{name} is not a text of 1 to {MAX_NAME // 2} characters", name)
        rollout, attempt = fields.get("rollout"), fields.get("attempt", 0)
        if type(rollout) is not int or not 0 <= rollout < group_size:
            raise refused(f"rollout is not a whole number from 0 to {group_size - 1}", "rollout")
        if type(attempt) is not int or not 0 <= attempt < _MOST_ATTEMPTS:
            raise refused("attempt is not a whole number from 0", "attempt")
        return cls(str(group), str(task), rollout, attempt)


def described(session: Session) -> dict[str, Any]:
    description = {"session": session.id, "state": session.state, "turns": len(session.turns)}
    return description | ({"reward": session.reward} if session.state == "rewarded" else {})


@dataclass(frozen=True, slots=True)
class RewardRequest:
    reward: float  # the reward of the rollout
    info: Mapping[str, Any]  # what else goes into the experience
    # Rewards of turns: of all in the order in which they were recorded, or by the ids of answers, where one
    # that is not named has 0; None if only the rollout has a reward.
    turns: Sequence[float] | Mapping[str, float] | None = None

    @classmethod
    def read(cls, body: object) -> "RewardRequest":
        fields = body if isinstance(body, dict) else {}
        reward, info = _number(fields.get("reward")), fields.get("info", {})
        if not abs(reward) <= MOST_REWARD or not isinstance(info, dict):
            text = f'a reward is {{"reward": a number up to {MOST_REWARD:g}, "info": an object or nothing}}'
            raise refused(text, "reward")
        if unknown := set(fields) - {"reward", "info", "turn_rewards"}:
            raise refused(f"{min(unknown)[:80]} is not a field of a reward")
        _check_info(info)
        return cls(reward, info, _turns(fields.get("turn_rewards")))

    def of_turns(self, session: Session) -> list[float] | None:
        if self.turns is None:
            return None
        ids = [session.answer_id(turn) for turn in session.turns]
        if isinstance(self.turns, Mapping):
            if unknown := set(self.turns) - set(ids):
                raise refused(f"{min(unknown)[:80]} is no answer of the session", "turn_rewards")
            rewards = [self.turns.get(name, 0.0) for name in ids]
        else:
            rewards = list(self.turns)
        if len(rewards) != len(ids):
            text = f"turn_rewards has {len(rewards)} rewards, and the session {len(ids)} turns"
            raise refused(text, "turn_rewards")
        total, size = math.fsum(rewards), math.fsum(map(abs, rewards)) + abs(self.reward)
        if abs(total - self.reward) > _ROUNDING * size:
            text = f"turn_rewards add up to {total:g} where the reward is {self.reward:g}"
            raise refused(text, "turn_rewards")
        return rewards


def _turns(rewards: object) -> list[float] | dict[str, float] | None:
    if rewards is None:
        return None
    values = list(rewards.values()) if isinstance(rewards, dict) else rewards
    numbers = [_number(number) for number in values] if isinstance(values, list) else [math.nan]
    if not all(abs(number) <= MOST_REWARD for number in numbers):
        text = f"turn_rewards is no list of numbers up to {MOST_REWARD:g}, nor an object of them by ids of answers"
        raise refused(text, "turn_rewards")
    return dict(zip(rewards, numbers, strict=True)) if isinstance(rewards, dict) else numbers


def _check_info(info: Mapping[str, Any]) -> None:
    try:
        length = len(json.dumps(info, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise refused(f"info cannot be stored: {error}", "info") from error
    if length > MOST_INFO:
        raise refused(f"info has {length} characters as JSON; the limit is {MOST_INFO}", "info")


def _number(value: object) -> float:
    """Return a number, which is not finite if the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
