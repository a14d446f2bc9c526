"""Which attempt is played next. The journal is the ledger: groups are named after the place of their task.

A group is `EPOCH.POSITION`. Those of earlier places are open or over, so a restarted explorer finds from their names
where it was. Rollouts that the process before had not finished are played anew, as the next attempt.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from explorer_hooks.parts.agents.api_errors import ApiError
from explorer_hooks.parts.agents.driver import SessionRequest
from explorer_hooks.parts.agents.gateway import Gateway
from explorer_hooks.parts.agents.sessions import EQUAL, WRITTEN, SessionGroup, Turn
from explorer_hooks.run.curriculum import Curriculum
from explorer_hooks.run.scoring import ScoredText
from explorer_hooks.tasks.order import Tasks
from explorer_hooks.tasks.task import Task
from syncd.errors import ConfigError

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Attempt:
    session: str
    group: str
    rollout: int  # which rollout of the group
    task: Task


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    epochs: int  # passes over the tasks; 0 for no end
    retries: int  # further attempts at a rollout whose agent failed
    max_failures: int  # groups in a row that may be dropped
    whole_groups: bool = False  # whether all rollouts of a group are played together


class AgentSchedule:
    """Chooses attempts. Used in the gateway's event loop alone.

    `has_room` returns whether another group may begin when so many are open. Without a `seed` tasks keep their
    order in the file.
    """

    def __init__(
        self,
        gateway: Gateway,
        tasks: Tasks,
        seed: str | None,
        limits: ScheduleLimits,
        has_room: Callable[[int], bool],
        curriculum: Curriculum,
    ) -> None:
        self.curriculum, self.skipped = curriculum, 0
        self._gateway, self._tasks, self._seed = gateway, tasks, seed
        self._limits, self._has_room = limits, has_room
        self._playing: set[tuple[str, int]] = set()
        self._failures: Counter[tuple[str, int]] = Counter()
        self._dropped_in_row = 0
        sessions = gateway.sessions
        self._last = max(map(_place, [*sessions.groups, *sessions.over]), default=(0, -1))

    async def abandon_open(self) -> None:
        sessions = self._gateway.sessions.by_id.values()
        for session in [session for session in sessions if session.state == "open"]:
            await self._gateway.abandon(session.id)

    async def is_over(self) -> bool:
        size = self._gateway.limits.group_size
        groups = self._gateway.sessions.groups.values()
        return (
            self._upcoming() is None and not self._playing and all(group.is_whole(size) for group in groups)
        )

    async def next(self) -> Sequence[Attempt]:
        """Return the attempts that come next, to be played together, in sessions that have begun; none for now."""
        if self._limits.whole_groups:
            await self._drop_torn()
        attempts = self._open_rollouts() or self._new_rollouts()
        self._playing.update((group, rollout) for group, rollout, _ in attempts)
        return [await self._begun(*attempt) for attempt in attempts]

    async def rewarded(self, attempt: Attempt, reward: float, info: dict[str, object]) -> None:
        """End an attempt with its reward; without a recorded turn it counts as failed."""
        said = {"reward": reward, "info": info}
        if "turn_rewards" in info:
            said["turn_rewards"] = info.pop("turn_rewards")
        try:
            await self._gateway.reward(attempt.session, said)
        except ApiError as error:
            await self._failed(attempt, error.message, "agent")
            return
        self._end(attempt)

    async def has_ended(self, attempt: Attempt) -> bool:
        """Return whether the agent gave the reward by HTTP, or the group is over, however the agent ended."""
        session = self._gateway.sessions.by_id.get(attempt.session)
        if session is not None and session.state != "rewarded":
            return False
        self._end(attempt)
        return True

    def _end(self, attempt: Attempt) -> None:
        self._playing.discard((attempt.group, attempt.rollout))
        self._failures.pop((attempt.group, attempt.rollout), None)
        sessions = self._gateway.sessions
        group = sessions.groups.get(attempt.group)
        is_whole = group is not None and group.is_whole(self._gateway.limits.group_size)
        if is_whole or sessions.over.get(attempt.group) in (WRITTEN, EQUAL):
            self._dropped_in_row = 0

    async def failed(
        self, attempt: Attempt, problem: str, why: str = "agent", causes: Sequence[Attempt] = ()
    ) -> None:
        """Abandon an attempt without a reward, and after too many its group, which is counted under `why`.

        If the agent ended where its turns or its context do, each further attempt would get the same answers and end
        there: its group is dropped at once, counted as that, and no failure. `causes` are the attempts of its episode
        that went wrong, if others than this one may have.
        """
        limit = self._limit_met(causes or (attempt,)) if why == "agent" else ""
        await self._failed(attempt, problem, why, limit)

    async def _failed(self, attempt: Attempt, problem: str, why: str, limit: str = "") -> None:
        key = (attempt.group, attempt.rollout)
        details = {"problem": problem, **({"limit": limit} if limit else {})}
        _LOG.warning("attempt_failed", group=attempt.group, rollout=attempt.rollout, **details)
        if attempt.group in self._gateway.sessions.groups:
            await self._gateway.abandon(attempt.session)
            self._failures[key] += 1
            if limit:
                await self._give_up(attempt.group, limit)
            elif self._failures[key] > self._limits.retries:
                await self._give_up(attempt.group, why)
                self._dropped_in_row += 1
        self._playing.discard(key)
        if self._dropped_in_row >= self._limits.max_failures:
            message = f"{self._dropped_in_row} groups in a row were dropped, the last one because: {problem}"
            raise ConfigError(message, hint="the first attempt_failed has the cause")

    def _limit_met(self, attempts: Sequence[Attempt]) -> str:
        by_name = self._gateway.sessions.groups
        groups = [by_name[attempt.group] for attempt in attempts if attempt.group in by_name]
        ids = {attempt.session for attempt in attempts}
        sessions = [session for group in groups for session in group.rollouts.values() if session.id in ids]
        return next((session.limit for session in sessions if session.limit and session.turns), "")

    async def _give_up(self, group: str, why: str) -> None:
        await self._gateway.drop(group, why)
        for rollout in range(self._gateway.limits.group_size):
            self._failures.pop((group, rollout), None)

    async def answer(self, attempt: Attempt) -> ScoredText:
        session = self._gateway.sessions.by_id.get(attempt.session)
        return last_answer(session.turns) if session is not None and session.turns else ScoredText("")

    async def _begun(self, group: str, rollout: int, number: int) -> Attempt:
        task = self._task(group)
        # There was room when the place was taken. The trainer may need fewer groups by now: another thread tells it.
        opened = await self._gateway.open(SessionRequest(group, task.id, rollout, number), has_room=True)
        return Attempt(opened["session"], group, rollout, task)

    async def _drop_torn(self) -> None:
        """Drop groups that were played together and of which only a part has its reward."""
        for group in list(self._gateway.sessions.groups.values()):
            has_reward = any(session.state == "rewarded" for session in group.rollouts.values())
            if has_reward and self._unplayed(group):
                await self._give_up(group.name, "agent")
                self._dropped_in_row += 1

    def _open_rollouts(self) -> list[tuple[str, int, int]]:
        for group in self._gateway.sessions.groups.values():
            if unplayed := self._unplayed(group):
                return unplayed if self._limits.whole_groups else unplayed[:1]
        return []

    def _unplayed(self, group: SessionGroup) -> list[tuple[str, int, int]]:
        """Return the rollouts of a group that nobody plays; none while another one of an episode is played."""
        rollouts = range(self._gateway.limits.group_size)
        if self._limits.whole_groups and any((group.name, rollout) in self._playing for rollout in rollouts):
            return []
        numbers = [(rollout, _next_attempt(group, rollout)) for rollout in rollouts]
        return [
            (group.name, rollout, number)
            for rollout, number in numbers
            if number is not None and (group.name, rollout) not in self._playing
        ]

    def _new_rollouts(self) -> list[tuple[str, int, int]]:
        if not self._has_room(len(self._gateway.sessions.groups)):
            return []
        count = self._gateway.limits.group_size if self._limits.whole_groups else 1
        while (upcoming := self._upcoming()) is not None:
            self._last = upcoming
            group = f"{upcoming[0]}.{upcoming[1]}"
            if self.curriculum.takes(*upcoming, self._task(group).id):
                return [(group, rollout, 0) for rollout in range(count)]
            self.skipped += 1
        return []

    def _upcoming(self) -> tuple[int, int] | None:
        """Return epoch and position of the next task, None behind the last epoch."""
        epoch, position = self._last
        if position + 1 >= self._tasks.epoch_length:
            epoch, position = epoch + 1, -1
        return None if 0 < self._limits.epochs <= epoch else (epoch, position + 1)

    def _task(self, group: str) -> Task:
        epoch, position = _place(group)
        return self._tasks[self._tasks.order(self._seed, epoch)[position]]


def _next_attempt(group: SessionGroup, rollout: int) -> int | None:
    """Return the number of the attempt that a rollout needs, None if it is open or has its reward."""
    session = group.rollouts.get(rollout)
    if session is None:
        return 0
    return session.attempt + 1 if session.state == "abandoned" else None


def _place(group: str) -> tuple[int, int]:
    epoch, _, position = group.partition(".")
    return int(epoch), int(position)


def last_answer(turns: Sequence[Turn]) -> ScoredText:
    last = turns[-1]
    return ScoredText(last.answer.content, len(last.tokens), last.answer.finish == "length")
