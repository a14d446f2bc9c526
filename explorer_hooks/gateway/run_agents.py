"""`explorer run` with `[explorer.agent]`: agents play the tasks through a gateway in this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from explorer_hooks.explorer.config import ExplorerFile
from explorer_hooks.explorer.opening import open_reward
from explorer_hooks.explorer.rewards import plain_task
from explorer_hooks.explorer.scoring import Scorer
from explorer_hooks.explorer.tasks import read_tasks
from explorer_hooks.gateway.http_thread import HttpThread
from explorer_hooks.gateway.players import CommandPlayer, FunctionPlayer, Player, directories_of
from explorer_hooks.gateway.run_record import PlayedTasks
from explorer_hooks.gateway.schedule import AgentSchedule, Attempt, ScheduleLimits
from explorer_hooks.gateway.serve import opened_gateway
from explorer_hooks.gateway.service import GatewayService
from explorer_hooks.stopping import Stop
from syncd.errors import SyncdError

_LISTEN = "127.0.0.1:0"
_PAUSE = 0.1
"""Seconds until it is asked again whether there is an attempt to play."""


def run_agents(file: ExplorerFile, health: str | None = None) -> str:
    """Have agents play the tasks of a file, and return why that ended.

    Args:
        file: The job's file.
        health: `HOST:PORT` to answer health checks at; None for nowhere.

    Raises:
        SyncdError: Something cannot be used, or failed for good; its exit code says what.
    """
    section = file.explorer
    tasks = read_tasks(section.tasks, section.prompt_key, section.answer_key)
    seed = f"{file.job.seed}/{section.name}" if section.shuffle else None
    with (
        Stop().on_signals() as stop,
        closing(_open_player(file, stop)) as player,
        closing(open_reward(file)) as scorer,
        opened_gateway(file, stop, health, _LISTEN, PlayedTasks(tasks.digest, seed or "")) as parts,
    ):
        limits = ScheduleLimits(section.epochs, section.agent.retries, section.reward.max_failures)
        schedule = AgentSchedule(parts.gateway, tasks, seed, limits, parts.room.has)
        parts.http.call(schedule.abandon_open())
        judge = scorer if section.agent.reward == "function" else None
        threads = AgentThreads(schedule, player, judge, parts.http, stop)
        with threads.playing(section.agent.concurrency):
            return GatewayService(parts).run(threads)


def _open_player(file: ExplorerFile, stop: Stop) -> Player:
    """Return what plays rollouts.

    Raises:
        ConfigError: The function cannot be imported.
    """
    agent = file.explorer.agent
    if agent.command:
        has_reward = agent.reward == "agent"
        return CommandPlayer(agent.command, agent.timeout, has_reward=has_reward, stop=stop)
    return FunctionPlayer(agent.function, agent.timeout, agent.concurrency, directories_of(file.job.source))


class AgentThreads:
    """Plays attempts, each in a thread.

    Args:
        schedule: Chooses attempts.
        player: Plays them.
        judge: Scores last answers; None if agents say their rewards themselves.
        http: The gateway.
        stop: Once it returns true, no further attempt is begun.
    """

    def __init__(
        self, schedule: AgentSchedule, player: Player, judge: Scorer | None, http: HttpThread, stop: Stop
    ) -> None:
        self._schedule, self._player, self._judge = schedule, player, judge
        self._http, self._stop = http, stop
        self._ended = threading.Event()
        self.failure: SyncdError | None = None

    @contextmanager
    def playing(self, count: int) -> Iterator[None]:
        """Play so many attempts at a time while the block lasts."""
        for number in range(count):
            # Nobody waits for these threads: an agent may hang until its time is over.
            threading.Thread(target=self._work, name=f"agent-{number}", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def is_over(self) -> bool:
        """Return whether all tasks are played."""
        return self._http.call(self._schedule.is_over())

    def _work(self) -> None:
        try:
            while not self._is_ended() and self.failure is None:
                attempt = self._http.call(self._schedule.next())
                if attempt is None:
                    time.sleep(_PAUSE)
                else:
                    self._play(attempt)
        except SyncdError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001 - the service would wait for ever
            if not self._is_ended():
                self.failure = SyncdError(f"playing failed: {error!r}")

    def _is_ended(self) -> bool:
        return self._stop() or self._ended.is_set()

    def _play(self, attempt: Attempt) -> None:
        task = plain_task(attempt.task)
        score = self._player.play(f"{self._http.url}/s/{attempt.session}/v1", attempt.session, task)
        if self._is_ended():
            return  # the agent may have been killed; the next start plays it anew
        if self._judge is not None and not score.problem:
            answer = self._http.call(self._schedule.answer(attempt))
            score = self._judge.score([(attempt.task.text, answer, task)])[0]
        if score.reward is None:
            self._http.call(self._schedule.failed(attempt, score.problem))
        else:
            self._http.call(self._schedule.rewarded(attempt, score.reward, dict(score.info)))
