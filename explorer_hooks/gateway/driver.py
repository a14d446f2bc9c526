"""What drivers ask for, read from the bodies of their requests, and what they are told."""

import json
import math
from dataclasses import dataclass
from typing import Any

from explorer_hooks.gateway.api_errors import refused
from explorer_hooks.gateway.sessions import Session
from syncd.experience.model import MAX_INFO, MAX_NAME

MOST_REWARD = 1e18
"""The largest reward that trainers take."""

MOST_INFO = MAX_INFO // 2
"""Characters of a reward's info as JSON."""

_MOST_ATTEMPTS = 1 << 16


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A driver's request for a session.

    Args:
        group: The group of the rollout, by any name.
        task: The task.
        rollout: Which rollout of the group.
        attempt: Which attempt at it; a later one abandons those before.
    """

    group: str
    task: str
    rollout: int
    attempt: int

    @classmethod
    def read(cls, body: object, group_size: int) -> "SessionRequest":
        """Return the request of a body.

        Raises:
            ApiError: It is none.
        """
        found = body if isinstance(body, dict) else {}
        unknown = set(found) - {"group", "task", "rollout", "attempt"}
        if unknown:
            raise refused(f"{min(map(str, unknown))[:80]} is not a field of a session")
        group, task = found.get("group"), found.get("task")
        for name, value in (("group", group), ("task", task)):
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME // 2 or not value.isprintable():
                raise refused(f"{name} is not a text of 1 to {MAX_NAME // 2} characters", name)
        rollout, attempt = found.get("rollout"), found.get("attempt", 0)
        if type(rollout) is not int or not 0 <= rollout < group_size:
            raise refused(f"rollout is not a whole number from 0 to {group_size - 1}", "rollout")
        if type(attempt) is not int or not 0 <= attempt < _MOST_ATTEMPTS:
            raise refused("attempt is not a whole number from 0", "attempt")
        return cls(str(group), str(task), rollout, attempt)


def described(session: Session) -> dict[str, Any]:
    """Return what drivers are told of a session."""
    told = {"session": session.id, "state": session.state, "turns": len(session.turns)}
    return told | ({"reward": session.reward} if session.state == "rewarded" else {})


def read_reward(body: object) -> tuple[float, dict[str, Any]]:
    """Return the reward of a body, and what else it says.

    Raises:
        ApiError: It is none, or cannot be stored.
    """
    found = body if isinstance(body, dict) else {}
    reward, info = _number(found.get("reward")), found.get("info", {})
    if not abs(reward) <= MOST_REWARD or not isinstance(info, dict):
        text = f'a reward is {{"reward": a number up to {MOST_REWARD:g}, "info": an object or nothing}}'
        raise refused(text, "reward")
    if unknown := set(found) - {"reward", "info"}:
        raise refused(f"{min(unknown)[:80]} is not a field of a reward")
    try:
        length = len(json.dumps(info, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise refused(f"info cannot be stored: {error}", "info") from error
    if length > MOST_INFO:
        raise refused(f"info has {length} characters as JSON; the limit is {MOST_INFO}", "info")
    return reward, info


def _number(value: object) -> float:
    """Return a number, which is not finite if the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
