"""Which attempt is played next. The journal is the ledger: groups are named after the place of their task.

A group is `EPOCH.POSITION`. Those of earlier places are open or over, so a restarted explorer finds from their names
where it was. Rollouts that the process before had not finished are played anew, as the next attempt.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from explorer_hooks.explorer.tasks import Task, Tasks, order
from explorer_hooks.gateway.api_errors import ApiError
from explorer_hooks.gateway.driver import SessionRequest
from explorer_hooks.gateway.gateway import Gateway
from explorer_hooks.gateway.sessions import SessionGroup
from syncd.errors import ConfigError

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a rollout that is being played.

    Args:
        session: Its session.
        group: Its group.
        rollout: Which rollout of the group.
        task: The task.
    """

    session: str
    group: str
    rollout: int
    task: Task


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """How much is played.

    Args:
        epochs: Passes over the tasks; 0 for no end.
        retries: Further attempts at a rollout whose agent failed.
        max_failures: Groups in a row that may be dropped.
    """

    epochs: int
    retries: int
    max_failures: int


class AgentSchedule:
    """Chooses attempts. Used in the gateway's event loop alone.

    Args:
        gateway: Has the sessions.
        tasks: The tasks.
        seed: The seed of their order; None for the order of the file.
        limits: How much is played.
        has_room: Returns whether another group may begin when so many are open.
    """

    def __init__(
        self,
        gateway: Gateway,
        tasks: Tasks,
        seed: str | None,
        limits: ScheduleLimits,
        has_room: Callable[[int], bool],
    ) -> None:
        self._gateway, self._tasks, self._seed = gateway, tasks, seed
        self._limits, self._has_room = limits, has_room
        self._playing: set[tuple[str, int]] = set()
        self._failures: Counter[tuple[str, int]] = Counter()
        self._dropped_in_row = 0
        sessions = gateway.sessions
        self._last = max(map(_place, [*sessions.groups, *sessions.over]), default=(0, -1))

    async def abandon_open(self) -> None:
        """Abandon the sessions of agents that an earlier process had started."""
        for session in [one for one in self._gateway.sessions.by_id.values() if one.state == "open"]:
            await self._gateway.abandon(session.id)

    async def is_over(self) -> bool:
        """Return whether all epochs are played, and no group is open that is not whole."""
        size = self._gateway.limits.group_size
        groups = self._gateway.sessions.groups.values()
        return self._upcoming() is None and not self._playing and all(one.is_whole(size) for one in groups)

    async def next(self) -> Attempt | None:
        """Return the next attempt, with a session that has begun; None while there is none."""
        found = self._open_rollout() or self._new_rollout()
        if found is None:
            return None
        group, rollout, number = found
        task = self._task(group)
        self._playing.add((group, rollout))
        told = await self._gateway.open(SessionRequest(group, task.id, rollout, number))
        return Attempt(told["session"], group, rollout, task)

    async def rewarded(self, attempt: Attempt, reward: float, info: dict[str, object]) -> None:
        """End an attempt with its reward; without a recorded turn it counts as failed."""
        try:
            await self._gateway.reward(attempt.session, {"reward": reward, "info": info})
        except ApiError as error:
            await self.failed(attempt, error.message)
            return
        self._playing.discard((attempt.group, attempt.rollout))
        group = self._gateway.sessions.groups.get(attempt.group)
        if group is not None and group.is_whole(self._gateway.limits.group_size):
            self._dropped_in_row = 0

    async def failed(self, attempt: Attempt, problem: str) -> None:
        """Abandon an attempt, and after too many its group.

        Raises:
            ConfigError: Too many groups in a row were dropped.
        """
        place = (attempt.group, attempt.rollout)
        self._failures[place] += 1
        _LOG.warning("attempt_failed", group=attempt.group, rollout=attempt.rollout, problem=problem)
        await self._gateway.abandon(attempt.session)
        if self._failures[place] > self._limits.retries and attempt.group in self._gateway.sessions.groups:
            await self._gateway.drop(attempt.group, "agent")
            self._dropped_in_row += 1
        self._playing.discard(place)
        if self._dropped_in_row >= self._limits.max_failures:
            message = f"{self._dropped_in_row} groups in a row were dropped, the last one because: {problem}"
            raise ConfigError(message, hint="try the agent on that task")

    async def answer(self, attempt: Attempt) -> str:
        """Return the text of the last answer of an attempt, empty if there is none."""
        session = self._gateway.sessions.by_id.get(attempt.session)
        return session.turns[-1].answer.content if session is not None and session.turns else ""

    def _open_rollout(self) -> tuple[str, int, int] | None:
        """Return a rollout of an open group that nobody plays, and the number of its next attempt."""
        for group in self._gateway.sessions.groups.values():
            for rollout in range(self._gateway.limits.group_size):
                number = _next_attempt(group, rollout)
                if number is not None and (group.name, rollout) not in self._playing:
                    return group.name, rollout, number
        return None

    def _new_rollout(self) -> tuple[str, int, int] | None:
        upcoming = self._upcoming()
        if upcoming is None or not self._has_room(len(self._gateway.sessions.groups)):
            return None
        self._last = upcoming
        return f"{upcoming[0]}.{upcoming[1]}", 0, 0

    def _upcoming(self) -> tuple[int, int] | None:
        """Return epoch and position of the next task, None behind the last epoch."""
        epoch, position = self._last
        if position + 1 >= len(self._tasks.all):
            epoch, position = epoch + 1, -1
        return None if 0 < self._limits.epochs <= epoch else (epoch, position + 1)

    def _task(self, group: str) -> Task:
        epoch, position = _place(group)
        count = len(self._tasks.all)
        places = order(count, self._seed, epoch) if self._seed is not None else range(count)
        return self._tasks.all[places[position]]


def _next_attempt(group: SessionGroup, rollout: int) -> int | None:
    """Return the number of the attempt that a rollout needs, None if it is open or has its reward."""
    session = group.rollouts.get(rollout)
    if session is None:
        return 0
    return session.attempt + 1 if session.state == "abandoned" else None


def _place(group: str) -> tuple[int, int]:
    epoch, _, position = group.partition(".")
    return int(epoch), int(position)
