"""Evaluation with agents: they play held-out tasks through a gateway of their own, of which nothing is trained.

It has its own sessions, port and journal, in a directory that goes with it: what evaluates cannot reach a batch.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import structlog

from explorer_hooks.parts.agents.app import GatewayApp
from explorer_hooks.parts.agents.driver import SessionRequest
from explorer_hooks.parts.agents.gateway import Gateway
from explorer_hooks.parts.agents.http_thread import HttpThread, listening, own_token
from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.players import Player
from explorer_hooks.parts.agents.schedule import last_answer
from explorer_hooks.parts.agents.serve import open_maker
from explorer_hooks.parts.agents.service import GatewayParts
from explorer_hooks.parts.agents.sessions import Session, Sessions, Turn
from explorer_hooks.parts.agents.tables import AgentSection
from explorer_hooks.parts.agents.turns import AWAY
from explorer_hooks.run.held_out import HeldOut, Outcomes, TaskOutcome, warn_skipped
from explorer_hooks.run.rewards import plain_task
from explorer_hooks.run.scoring import ScoredGroup
from explorer_hooks.tasks.task import Task
from syncd.errors import EngineUnreachableError
from syncd.protocol.version import Pair

_LISTEN = "127.0.0.1:0"
_PAUSE = 0.25  # seconds between two looks whether to stop

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    reward: float
    turns: Sequence[Turn]  # its turns, at least one

    def is_of(self, pair: Pair) -> bool:
        """Return whether a version has chosen all its tokens, as far as the engine has proven."""
        spans = {span[1:] for turn in self.turns for span in turn.spans}
        return spans == {pair} and not any(any(turn.unproven or ()) for turn in self.turns)


class AgentEvaluator:
    """Has agents play held-out tasks, with the engine, tokenizer and model of the training's gateway."""

    def __init__(self, parts: GatewayParts, player: Player, agent: AgentSection) -> None:
        self._parts, self._player, self._agent = parts, player, agent

    def outcomes(self, held_out: HeldOut, pair: Pair) -> Outcomes | None:
        """Return what became of each task of a set.

        None if it was told to stop, if another version took part, or if a turn has waited in vain for the engine: who
        evaluates does not follow the job meanwhile, and so cannot bring the engine back.
        """
        played = self._rollouts(held_out)
        if played is not None and all(rollout.is_of(pair) for rollouts in played for rollout in rollouts):
            return [_outcome(rollouts, held_out.section.samples) for rollouts in played]
        if not self._parts.stop():
            warn_skipped(held_out, pair)
        return None

    def _rollouts(self, held_out: HeldOut) -> list[list[PlayedRollout]] | None:
        try:
            with self._gateway(held_out) as (gateway, http):
                play = partial(self._played, gateway, http, held_out)
                tasks, samples = len(held_out.tasks), held_out.section.samples
                return self._all(play, tasks, samples, partial(_is_away, gateway))
        except EngineUnreachableError:
            return None

    def _all(
        self,
        play: Callable[[int, int], PlayedRollout | None],
        tasks: int,
        samples: int,
        is_away: Callable[[], bool],
    ) -> list[list[PlayedRollout]] | None:
        pool = ThreadPoolExecutor(self._agent.concurrency, thread_name_prefix="evaluation")
        try:
            asked = [[pool.submit(play, task, sample) for sample in range(samples)] for task in range(tasks)]
            while wait([future for row in asked for future in row], timeout=_PAUSE).not_done:
                if self._parts.stop() or is_away():
                    return None
            return (
                None
                if is_away()
                else [[rollout for future in row if (rollout := future.result())] for row in asked]
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # who plays ends with the player

    @contextmanager
    def _gateway(self, held_out: HeldOut) -> Iterator[tuple[Gateway, HttpThread]]:
        """Yield a gateway for a set, with the set's settings of sampling."""
        parts, section, sessions = self._parts, held_out.section, Sessions()
        with ExitStack() as opened:
            directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="syncd-evaluation-"))
            journal = opened.enter_context(TurnJournal(directory))
            maker = opened.enter_context(
                closing(
                    open_maker(parts.followed, parts.tokens, parts.versions, parts.stop, section.temperature)
                )
            )
            limits = replace(parts.gateway.limits, group_size=section.samples, max_tokens=held_out.max_tokens)
            gateway = parts.gateway.beside(sessions, journal, maker, limits)
            journal.start(sessions.needs, sessions.rest)
            health = partial(parts.followed.follower.health, watched=False)
            application = GatewayApp(gateway, own_token(directory), health).application()
            listener = opened.enter_context(closing(listening(_LISTEN)))
            yield gateway, opened.enter_context(HttpThread.serving(application, listener))

    def _played(
        self, gateway: Gateway, http: HttpThread, held_out: HeldOut, number: int, sample: int
    ) -> PlayedRollout | None:
        """Play a rollout, again if the agent fails; None if it does each time."""
        task, problem = held_out.tasks[number], ""
        for attempt in range(self._agent.retries + 1):
            opened = http.call(gateway.open(SessionRequest(str(number), task.id, sample, attempt)))
            name = str(opened["session"])
            (score,) = self._player.play(http.url, [name], plain_task(task))
            session = http.call(_session(gateway, name))
            reward, problem = score.reward, score.problem
            if session.state == "rewarded":
                reward = session.reward  # the agent has said it by HTTP
            elif self._agent.reward == "function" and not problem and session.turns:
                reward, problem = _judged(held_out, task, session)
            elif reward is not None and (problem := gateway.limits.reward_problem(reward)):
                reward = None
            if reward is not None and session.turns:
                return PlayedRollout(reward, tuple(session.turns))
            if self._parts.stop():
                break
        _LOG.warning(
            "evaluation_failed", set=held_out.name, task=task.id, problem=problem or "it took no turn"
        )
        return None


def _is_away(gateway: Gateway) -> bool:
    if gateway.failure is not None:
        raise gateway.failure
    return gateway.refused[AWAY] > 0


def _judged(held_out: HeldOut, task: Task, session: Session) -> tuple[float | None, str]:
    """Return the reward of the last answer, and why there is none."""
    group = ScoredGroup(task.text, plain_task(task), (last_answer(session.turns),))
    ((score,),) = held_out.scorer.score([group])
    return score.reward, score.problem


async def _session(gateway: Gateway, name: str) -> Session:
    """Return a session; in the event loop, which alone changes sessions."""
    return gateway.sessions.by_id[name]


def _outcome(rollouts: Sequence[PlayedRollout], samples: int) -> TaskOutcome:
    tokens = sum(len(turn.tokens) for rollout in rollouts for turn in rollout.turns)
    truncated = sum(rollout.turns[-1].answer.finish == "length" for rollout in rollouts)
    rewards = [rollout.reward for rollout in rollouts]
    return TaskOutcome(rewards if len(rewards) == samples else (), tokens, truncated)
