"""`explorer run` with `[explorer.agent]`: agents play the tasks through a gateway in this process."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from explorer_hooks.parts.agents.agent_evaluation import AgentEvaluator
from explorer_hooks.parts.agents.environment import EnvironmentPlayer
from explorer_hooks.parts.agents.environment_process import EnvironmentSettings
from explorer_hooks.parts.agents.http_thread import HttpThread
from explorer_hooks.parts.agents.players import CommandPlayer, FunctionPlayer, Player, directories_of
from explorer_hooks.parts.agents.run_record import PlayedTasks
from explorer_hooks.parts.agents.schedule import AgentSchedule, Attempt, ScheduleLimits
from explorer_hooks.parts.agents.serve import model_name, opened_gateway
from explorer_hooks.parts.agents.service import GatewayParts, GatewayService
from explorer_hooks.parts.agents.tables import ENVIRONMENTS, AgentSection
from explorer_hooks.run.curriculum import DIFFICULTY, Curriculum, TaskMean
from explorer_hooks.run.held_out import EvaluationSets, VersionWatcher, open_evaluation
from explorer_hooks.run.open_explorer import open_reward
from explorer_hooks.run.own_files import EVALUATIONS, Records
from explorer_hooks.run.rewards import Score, plain_task
from explorer_hooks.run.scoring import ScoredGroup, Scorer
from explorer_hooks.stopping import Stop
from explorer_hooks.tasks.order import Tasks
from explorer_hooks.tasks.sources import open_tasks
from syncd.errors import ConfigError, SyncdError
from syncd.jobfile.model import JobFile
from syncd.observe import log

_LISTEN = "127.0.0.1:0"
_PAUSE = 0.1  # seconds until it is asked again whether there is an attempt to play


def run_agents(file: JobFile, health: str | None = None) -> str:
    """Have agents play tasks, and return why that ended; `health`: HOST:PORT of health checks, None for none."""
    log.configure(file.explorer.log, sys.stderr)
    with Stop().on_signals() as stop:
        try:
            return _opened_and_played(file, stop, health)
        except ConfigError:
            if stop():  # an environment that is being loaded is given up
                return "told to stop"
            raise


def _opened_and_played(file: JobFile, stop: Stop, health: str | None) -> str:
    with (
        closing(_open_player(file, stop)) as player,
        closing(open_reward(file)) as scorer,
        open_evaluation(file, scorer) as sets,
    ):
        judge = scorer if file.explorer.part(AgentSection).reward == "function" else None
        if judge is not None and any(scores.needs_groups for scores in (judge, *sets.scorers)):
            hint = "leave the argument `responses` out, and take `response`"
            raise ConfigError(
                "agents' rollouts are scored one by one, and a function wants groups", hint=hint
            )
        tasks = (
            player.tasks
            if isinstance(player, EnvironmentPlayer)
            else open_tasks(file.explorer.training_sets, file.directory)
        )
        return _played(file, tasks, player, judge, sets, stop, health)


def _played(
    file: JobFile,
    tasks: Tasks,
    player: Player,
    judge: Scorer | None,
    sets: EvaluationSets,
    stop: Stop,
    health: str | None,
) -> str:
    section, agent = file.explorer, file.explorer.part(AgentSection)
    seed = f"{file.job.seed}/{section.name}" if section.shuffle else None
    with opened_gateway(file, stop, health, _LISTEN, PlayedTasks(tasks.digest, seed or "")) as parts:
        failures, whole_groups = section.reward.max_failures, agent.episode == "group"
        limits = ScheduleLimits(section.epochs, agent.retries, failures, whole_groups)
        difficulty = Records.own(parts.writer.job, parts.writer.explorer, DIFFICULTY)
        curriculum = Curriculum(section.curriculum, difficulty, seed or "")
        schedule = AgentSchedule(parts.gateway, tasks, seed, limits, parts.demand.allows, curriculum)
        parts.http.call(schedule.abandon_open())
        threads = AgentThreads(schedule, player, judge, parts.http, stop)
        with _evaluation(file, sets, parts) as evaluation, threads.playing(agent.concurrency):
            return GatewayService(parts, evaluation).run(threads)


@contextmanager
def _evaluation(file: JobFile, sets: EvaluationSets, parts: GatewayParts) -> Iterator[VersionWatcher | None]:
    """Yield what measures versions, with players of its own: those of the training may all be busy."""
    if not sets.scorers:
        yield None
        return
    records = Records.own(parts.writer.job, parts.writer.explorer, EVALUATIONS)
    with closing(_open_player(file, parts.stop)) as player:
        yield sets.watcher(AgentEvaluator(parts, player, file.explorer.part(AgentSection)), records)


def _open_player(file: JobFile, stop: Stop) -> Player:
    agent, directories = file.explorer.part(AgentSection), directories_of(file.job.source)
    if agent.environment:
        name = agent.environment.removeprefix(ENVIRONMENTS)
        settings = EnvironmentSettings(
            name, agent.options, agent.select, agent.python, directories, agent.pass_env
        )
        return EnvironmentPlayer(settings, agent.timeout, agent.processes, model_name(file), stop)
    if agent.command:
        has_reward = agent.reward == "agent"
        has_answer = has_reward or agent.answer == "agent"
        return CommandPlayer(
            agent.command,
            agent.timeout,
            has_reward=has_reward,
            stop=stop,
            has_answer=has_answer,
            passed=agent.pass_env,
        )
    return FunctionPlayer(agent.function, agent.timeout, agent.concurrency, directories, agent.pass_env)


class AgentThreads:
    """Plays attempts, each in a thread; once `stop` returns true, no further one is begun.

    `judge` scores last answers; None if agents say their rewards themselves.
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
        for number in range(count):
            # Nobody waits for these threads: an agent may hang until its time is over.
            threading.Thread(target=self._work, name=f"agent-{number}", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def is_over(self) -> bool:
        return self._http.call(self._schedule.is_over())

    @property
    def skipped(self) -> int:
        return self._schedule.skipped

    def measured(self, rewards: Sequence[TaskMean]) -> None:
        self._schedule.curriculum.measured(rewards)

    def _work(self) -> None:
        try:
            while not self._is_ended() and self.failure is None:
                attempts = self._http.call(self._schedule.next())
                if attempts:
                    self._play(attempts)
                else:
                    time.sleep(_PAUSE)
        except SyncdError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001 - the service would wait for ever
            if not self._is_ended():
                self.failure = SyncdError(f"playing failed: {error!r}")

    def _is_ended(self) -> bool:
        return self._stop() or self._ended.is_set()

    def _play(self, attempts: Sequence[Attempt]) -> None:
        task = plain_task(attempts[0].task)
        scores = self._player.play(self._http.url, [attempt.session for attempt in attempts], task)
        if self._is_ended():
            return  # the agent may have been killed; the next start plays it anew
        failed = next((score for score in scores if score.reward is None), None)
        causes = [attempt for attempt, score in zip(attempts, scores, strict=True) if score.reward is None]
        for attempt, score in zip(attempts, scores, strict=True):
            self._end(attempt, failed or score, task, causes)

    def _end(
        self, attempt: Attempt, score: Score, task: dict[str, Any], causes: Sequence[Attempt] = ()
    ) -> None:
        """End an attempt with its reward, or abandon it because of those of its episode that went wrong."""
        if self._http.call(self._schedule.has_ended(attempt)):
            return
        why = "agent"
        if self._judge is not None and not score.problem:
            answer, why = self._http.call(self._schedule.answer(attempt)), "reward"
            ((score,),) = self._judge.score([ScoredGroup(attempt.task.text, task, (answer,))])
        if score.reward is None:
            self._http.call(self._schedule.failed(attempt, score.problem, why, causes))
        else:
            self._http.call(self._schedule.rewarded(attempt, score.reward, dict(score.info)))
