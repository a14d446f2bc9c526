"""How a follower is set up, and what becomes of each of its turns."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from explorer_hooks.follower.checks import Verify
from explorer_hooks.follower.policy import Policy, parse_policy
from syncd.errors import ConfigError
from syncd.protocol.presence import TTL
from syncd.protocol.version import Pair

Kind = Literal["applied", "nothing", "refused", "failed", "unreachable", "gone", "ended"]

Tell = Callable[[str, str, Mapping[str, Any]], None]
"""Hears what happens: level (debug, info, warning, error), the name of the event, its fields."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How a follower follows.

    Args:
        policy: A policy, or its text: newest, every, exact=N, at-least=N.
        max_lag: Steps that the engine may be behind while it is worked with; None for any number.
        stage: A local directory for one copy a host; None to load from the job directory.
        verify: How closely a version is looked at before it is handed over; by default every byte is hashed.
        retries: How often a version that failed to load is tried again.
        backoff: Seconds before the first of these; twice as long before each further one, a minute at most.
        state_dir: Where the daemon keeps its state, if not in the job directory.
        poll: Seconds between two looks; by the kind of mount unless given.
        ttl: Seconds of silence after which others count as dead.
        check_every: Seconds between two questions to the engine what it runs.
        stay: Whether the follower waits for another trainer once one has gone, instead of ending.
        ready_file: A file that is there while the engine serves a version that is recent enough.

    Raises:
        ConfigError: A value cannot be used.
    """

    policy: Policy | str = field(default_factory=Policy)
    max_lag: int | None = None
    stage: str | None = None
    verify: Verify | str = Verify.CONTENT
    retries: int = 2
    backoff: float = 1.0
    state_dir: str | None = None
    poll: float | None = None
    ttl: float = TTL
    check_every: float = 5.0
    stay: bool = False
    ready_file: str | None = None

    def __post_init__(self) -> None:
        policy_of(self)
        try:
            Verify(self.verify)
        except ValueError:
            hint = "size, header or content"
            raise ConfigError(f"nothing is verified by {self.verify!r}", hint=hint) from None
        for name in ("retries", "backoff", "max_lag", "check_every"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}", hint="a number that is not negative")


def policy_of(options: FollowOptions) -> Policy:
    """Return the policy of options, where they hold its text too.

    Raises:
        ConfigError: The text names none.
    """
    return options.policy if isinstance(options.policy, Policy) else parse_policy(options.policy)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a turn.

    Args:
        kind: applied: the engine confirmed a version. nothing: none was due in time. refused: a version does not
            fit or is damaged; the engine was not touched. failed: it could not be loaded, and is given up for now.
            unreachable: the engine did not answer. gone: the one step that was wanted is not there any more.
            ended: the trainer has gone, or the policy wants nothing more.
        pair: The version concerned.
        reason: Why, where it was not applied.
        timings: Seconds of each part of a load: noticed, verify, stage, prepare, load, confirm.
    """

    kind: Kind
    pair: Pair | None = None
    reason: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)
