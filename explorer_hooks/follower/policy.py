"""How a follower is set up, and what it does next: pure functions of a frozen snapshot."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from syncd.errors import ConfigError
from syncd.protocol.layout import MAX_STEP
from syncd.protocol.presence import TTL
from syncd.protocol.version import Pair
from syncd.transports.files.leased_directory import Verification

Which = Literal["newest", "every", "exact", "at-least"]

_POLICY = re.compile(r"(newest|every)|(exact|at-least)=(\d{1,16})", re.ASCII)
_HINT = "newest, every, exact=N or at-least=N"


@dataclass(frozen=True, slots=True)
class FollowPolicy:
    # newest: the newest. every: each complete step up to the published one, in order. exact: one step.
    # at-least: the newest, once its step is at least `step`.
    which: Which = "newest"
    step: int = 0  # the step of exact and at-least


def parse_policy(text: str) -> FollowPolicy:
    match = _POLICY.fullmatch(text.strip())
    if match is None or int(match[3] or 0) > MAX_STEP:
        raise ConfigError(f"no policy is called {text[:80]!r}", hint=_HINT)
    name, step = (match[1], 0) if match[1] else (match[2], int(match[3]))
    return FollowPolicy(cast("Which", name), step)


OutcomeKind = Literal["applied", "nothing", "refused", "failed", "unreachable", "gone", "ended"]

EventListener = Callable[[str, str, Mapping[str, Any]], None]
"""Hears each event: its level (debug, info, warning, error), its name, its fields."""


EXAMS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class FollowOptions:
    # A policy, or its text: newest, every, exact=N, at-least=N.
    policy: FollowPolicy | str = field(default_factory=FollowPolicy)
    # Steps that the engine may be behind and still be given work; None for any number.
    max_lag: int | None = None
    stage: str | None = None  # a local directory for one copy per host; None to load from the job directory
    # Where this host gives its pieces of versions to others, and so reads the rest from them: HOST:PORT, or
    # NAME=ADDRESS of another reader than http. None to read from the job directory alone.
    peers: str | None = None
    # Whether the stage copies files of a step while they are written; they are used once it is published.
    early: bool = False
    # How closely a version is checked before the engine gets it; by default every byte is hashed.
    verify: Verification | str = Verification.CONTENT
    retries: int = 2  # how often a version that failed to load is tried again
    backoff: float = 1.0  # seconds before the first retry; doubled before each further one, up to a minute
    state_dir: str | None = None  # where the daemon keeps its state, if not in the job directory
    poll: float | None = None  # seconds between two polls; by default the kind of mount decides
    ttl: float = TTL  # seconds of silence after which others count as dead
    check_every: float = 5.0  # seconds between two polls of what the engine runs
    # Whether the follower waits for another trainer after one has ended, instead of ending too.
    stay: bool = False
    # A file that exists while the engine serves a version that is recent enough.
    ready_file: str | None = None
    # Whether an engine on the job's start model first reloads that, to show that it can.
    reload_test: bool = True
    # Whether an engine is first examined: whether its way of loading reaches every tensor. auto: if nobody else can
    # have it work.
    exam: Literal["auto", "on", "off"] = "auto"
    # Seconds after which an engine that has proven what it runs is asked again; 0 for never.
    prove_every: float = 600.0

    def __post_init__(self) -> None:
        policy_of(self)
        if self.peers and not self.stage:
            hint = "--stage /dev/shm/syncd --peers HOST:PORT  # explorer run: explorer.follow.stage"
            raise ConfigError("peers need a stage: hosts give each other what they have staged", hint=hint)
        if self.early and not self.stage:
            hint = "--stage /dev/shm/syncd --early  # explorer run: explorer.follow.stage"
            raise ConfigError("only a stage copies versions early", hint=hint)
        try:
            Verification(self.verify)
        except ValueError:
            hint = "size, header or content"
            raise ConfigError(f"nothing is verified by {self.verify!r}", hint=hint) from None
        if self.exam not in EXAMS:
            raise ConfigError(f"exam is {self.exam!r}", hint=", ".join(EXAMS))
        for name in ("retries", "backoff", "max_lag", "check_every", "prove_every"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}", hint="a number that is not negative")


def policy_of(options: FollowOptions) -> FollowPolicy:
    return options.policy if isinstance(options.policy, FollowPolicy) else parse_policy(options.policy)


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    # applied: the engine confirmed a version. nothing: none was due in time. refused: a version does not fit
    # or is damaged; the engine was not touched. failed: it could not be loaded, and is given up for now.
    # unreachable: the engine did not answer. gone: the step was removed before it was loaded. ended: the
    # trainer has ended, or the policy wants nothing more.
    kind: OutcomeKind
    pair: Pair | None = None  # the version concerned
    reason: str = ""  # why it was not applied
    # Seconds of each part of a load: noticed, verify, stage, prepare, load, confirm.
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FollowSnapshot:
    newest: Pair | None  # the published pair
    position: Pair | None = None  # the pair that was loaded last, None before the first
    # Whether `position` must be loaded again: the engine runs another version, or may be half loaded.
    again: bool = False
    # The steps below the published one that still exist, for the policies that visit them.
    steps: tuple[int, ...] = ()
    skipped: frozenset[Pair] = frozenset()  # pairs that were given up, or are retried later
    applied: Pair | None = None  # the pair that the engine has confirmed
    retries: bool = False  # whether a pair is retried later
    can_restore: bool = False  # whether the engine can be restored to what it ran
    quarantined: frozenset[int] = frozenset()  # the steps that the daemon has put aside
    last_good: Pair | None = None  # the newest version that an engine has shown to run, by the version file


FollowDecision = Pair | Literal["restore", "end", "missing", "wait"]
"""What a follower does next: load a pair; restore: put the engine back on the last good version; end: the policy
wants nothing more; missing: the step that it wants was removed; wait: nothing now."""


def decide(policy: FollowPolicy, now: FollowSnapshot) -> FollowDecision:
    if (pair := choose_version(policy, now)) is not None:
        return pair
    if now.again and now.newest and not now.retries and now.can_restore:
        return "restore"
    if is_done(policy, now.applied):
        return "end"
    return "missing" if has_passed(policy, now) else "wait"


def needs_steps(policy: FollowPolicy, now: FollowSnapshot) -> bool:
    """Return whether the decision depends on which older steps still exist."""
    newest = now.newest
    if newest is None or (now.position == newest and not now.again):
        return False
    return policy.which == "every" or (policy.which == "exact" and newest[1] > policy.step)


def choose_version(policy: FollowPolicy, now: FollowSnapshot) -> Pair | None:
    if now.newest is None:
        return None
    candidates = [pair for pair in _candidates(policy, now, now.newest) if pair not in now.skipped]
    return next((pair for pair in candidates if now.again or pair != now.position), None)


def is_done(policy: FollowPolicy, applied: Pair | None) -> bool:
    return policy.which == "exact" and applied is not None and applied[1] == policy.step


def has_passed(policy: FollowPolicy, now: FollowSnapshot) -> bool:
    """Return whether the one step that the policy wants was removed."""
    if policy.which != "exact" or now.newest is None or now.newest[1] <= policy.step:
        return False
    return policy.step not in now.steps


def _candidates(policy: FollowPolicy, now: FollowSnapshot, newest: Pair) -> Iterable[Pair]:
    if policy.which == "every":
        return _in_order(now, newest)
    if policy.which == "exact":  # who names a step gets it, even if it was put aside
        there = newest[1] == policy.step or policy.step in now.steps
        return [(newest[0], policy.step)] if there else []
    wanted = _last_good(now) if newest[1] in now.quarantined else [newest]
    return [pair for pair in wanted if policy.which == "newest" or pair[1] >= policy.step]


def _last_good(now: FollowSnapshot) -> list[Pair]:
    """Return the last good version in place of a quarantined one, unless the engine runs a later one."""
    good = now.last_good
    is_lost = now.again and not now.can_restore
    return [good] if good and (now.position is None or now.position <= good or is_lost) else []


def _in_order(now: FollowSnapshot, newest: Pair) -> list[Pair]:
    # Nothing records the first step of a generation: start a new generation with its newest step.
    if now.position is not None and now.position[0] != newest[0]:
        return [newest] if newest[1] not in now.quarantined else _last_good(now)
    after = now.position[1] if now.position else -1
    steps = sorted({*now.steps, newest[1]} - now.quarantined)
    return [(newest[0], step) for step in steps if after < step <= newest[1] or (now.again and step == after)]


def lag_of(applied: Pair | None, newest: Pair | None) -> float:
    """Return how many steps an engine is behind (no version: step 0); infinite if the trainer rolled back from it."""
    if newest is None:
        return 0
    generation, step = applied or (newest[0], 0)
    return max(newest[1] - step, 0) if generation == newest[0] else float("inf")


def is_within(applied: Pair | None, newest: Pair | None, max_lag: int | None) -> bool:
    return max_lag is None or lag_of(applied, newest) <= max_lag
