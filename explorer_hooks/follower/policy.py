"""Which version an engine goes to next, whether a sync is due, and how far behind one may work. Pure functions."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from syncd.client.sync_policy import SyncStyle, explorer_needs_sync
from syncd.errors import ConfigError
from syncd.protocol.layout import MAX_STEP
from syncd.protocol.version import Pair

Which = Literal["newest", "every", "exact", "at-least"]

_POLICY = re.compile(r"(newest|every)|(exact|at-least)=(\d{1,16})", re.ASCII)
_HINT = "newest, every, exact=N or at-least=N"


@dataclass(frozen=True, slots=True)
class Policy:
    """Which versions are loaded.

    Args:
        which: newest: the newest. every: each complete step up to the published one, in order. exact: one step.
            at-least: the newest, once its step is at least `step`.
        step: The step of exact and at-least.
    """

    which: Which = "newest"
    step: int = 0

    def __str__(self) -> str:
        return self.which if self.which in ("newest", "every") else f"{self.which}={self.step}"


def parse_policy(text: str) -> Policy:
    """Return the policy that a text names.

    Raises:
        ConfigError: It names none.
    """
    match = _POLICY.fullmatch(text.strip())
    if match is None or int(match[3] or 0) > MAX_STEP:
        raise ConfigError(f"no policy is called {text[:80]!r}", hint=_HINT)
    name, step = (match[1], 0) if match[1] else (match[2], int(match[3]))
    return Policy(next(which for which in _WHICH if which == name), step)


_WHICH: tuple[Which, ...] = ("newest", "every", "exact", "at-least")


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice is made from.

    Args:
        newest: The published pair.
        position: The pair that was loaded last, None before the first.
        again: Whether the engine must be loaded although it was: it runs something else, or may be half loaded.
        steps: The steps below the published one that are still there, for the policies that visit them.
        skipped: Pairs that were refused or given up.
    """

    newest: Pair | None
    position: Pair | None = None
    again: bool = False
    steps: tuple[int, ...] = ()
    skipped: frozenset[Pair] = frozenset()


def needs_steps(policy: Policy, situation: Situation) -> bool:
    """Say whether a choice depends on which older steps are still there."""
    newest = situation.newest
    if newest is None or (situation.position == newest and not situation.again):
        return False
    return policy.which == "every" or (policy.which == "exact" and newest[1] > policy.step)


def choose(policy: Policy, now: Situation) -> Pair | None:
    """Return the pair that is to be loaded now, None if there is none."""
    if now.newest is None:
        return None
    candidates = [pair for pair in _candidates(policy, now, now.newest) if pair not in now.skipped]
    return next((pair for pair in candidates if now.again or pair != now.position), None)


def is_done(policy: Policy, applied: Pair | None) -> bool:
    """Say whether nothing more will ever be loaded."""
    return policy.which == "exact" and applied is not None and applied[1] == policy.step


def has_passed(policy: Policy, now: Situation) -> bool:
    """Say whether the one step that is wanted has gone."""
    if policy.which != "exact" or now.newest is None or now.newest[1] <= policy.step:
        return False
    return policy.step not in now.steps


def _candidates(policy: Policy, now: Situation, newest: Pair) -> Iterable[Pair]:
    if policy.which == "every":
        return _in_order(now, newest)
    if policy.which == "exact":
        there = newest[1] == policy.step or policy.step in now.steps
        return [(newest[0], policy.step)] if there else []
    return [newest] if policy.which == "newest" or newest[1] >= policy.step else []


def _in_order(now: Situation, newest: Pair) -> list[Pair]:
    # Which step a generation began with is not written anywhere: of a new one, the newest is taken.
    if now.position is not None and now.position[0] != newest[0]:
        return [newest]
    after = now.position[1] if now.position else -1
    steps = sorted({*now.steps, newest[1]})
    return [(newest[0], step) for step in steps if after < step <= newest[1] or (now.again and step == after)]


def lag_of(applied: Pair | None, newest: Pair | None) -> float:
    """Return how many steps an engine is behind; endless where the trainer went back from what it runs.

    An engine that runs no version of the job is at step 0, which everybody starts with.
    """
    if newest is None:
        return 0
    generation, step = applied or (newest[0], 0)
    return max(newest[1] - step, 0) if generation == newest[0] else float("inf")


def is_within(applied: Pair | None, newest: Pair | None, max_lag: int | None) -> bool:
    """Say whether an engine may be worked with."""
    return max_lag is None or lag_of(applied, newest) <= max_lag


def is_due(style: SyncStyle, step: int, interval: int = 1, offset: int = 0) -> bool:
    """Say whether an explorer looks for a version after its own step; fully asynchronous ones always do."""
    return style is SyncStyle.FULLY_ASYNC or explorer_needs_sync(step, interval, offset)


def asks(style: SyncStyle) -> bool:
    """Say whether an explorer asks the trainer for a version, and waits for its answer."""
    return style is SyncStyle.EXPLORER_DRIVEN
