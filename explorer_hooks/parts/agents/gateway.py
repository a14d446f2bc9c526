"""What agents and drivers ask of the gateway; all of it runs in one event loop, which alone changes sessions."""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog

from explorer_hooks.hook import Unproven
from explorer_hooks.parts.agents.answers import AnswerParser, Completion, TokenLogprob, Usage
from explorer_hooks.parts.agents.api_errors import (
    TOO_MANY,
    ApiError,
    conflict,
    gone,
    missing,
    not_now,
    refused,
)
from explorer_hooks.parts.agents.chat import ChatRequest
from explorer_hooks.parts.agents.driver import RewardRequest, SessionRequest, described
from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.messages import next_key
from explorer_hooks.parts.agents.sessions import SegmentChoice, Session, SessionGroup, Sessions, Turn
from explorer_hooks.parts.agents.splice import PromptTooLongError, Splicer
from explorer_hooks.parts.agents.stop_strings import cut_at_stop
from explorer_hooks.parts.agents.turns import ENGINE_REFUSED, TurnMaker
from explorer_hooks.run.generation import GroupResult, Response
from explorer_hooks.run.token_versions import TokenVersions
from explorer_hooks.run.tokens import Tokens
from syncd.errors import SyncdError

_LOG = structlog.get_logger()
_T = TypeVar("_T")
_TOO_LONG, _MAX_TURNS = "context_length_exceeded", "max_turns"
_LIMITS = {_TOO_LONG: "context", ENGINE_REFUSED: "context", _MAX_TURNS: "turns"}
"""Which limit of a session an error means, by its code; an engine refuses the tokens of a prompt by their number."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    group_size: int  # rollouts of a group
    max_tokens: int  # tokens of an answer
    max_prompt_tokens: int
    max_turns: int  # turns of a session
    idle: float  # seconds without a request after which a group is dropped
    # exact: an answer continues the recorded tokens; template: only if the template writes them too.
    history: Literal["exact", "template"]
    segments: SegmentChoice = "all"  # which segments of a session are trained
    agents_reward: bool = False  # whether agents may end their sessions with a reward; else only drivers do
    # The least and the largest reward, also in size of a turn.
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    tolerates: bool = True  # whether harmless fields of requests are taken, without effect

    def reward_problem(self, reward: float, turns: Iterable[float] = ()) -> str:
        """Return why a reward, or that of one of its turns, is none that an agent may give; empty if it may."""
        low, high = self.reward_range
        most = max(abs(low), abs(high))
        wrong = [] if low <= reward <= high else [reward]
        wrong += [value for value in turns if abs(value) > most]
        where = f"explorer.agent.reward_range = [{low:g}, {high:g}]"
        return f"the reward {wrong[0]:g} is outside of {where}" if wrong else ""


class Gateway:
    """Answers agents and drivers.

    `has_room` returns whether another group may begin when so many are open; `model` is what answers call the model.
    """

    def __init__(
        self,
        sessions: Sessions,
        journal: TurnJournal,
        tokens: Tokens,
        splicer: Splicer,
        parser: AnswerParser,
        maker: TurnMaker,
        limits: GatewayLimits,
        has_room: Callable[[int], bool],
        model: str,
    ) -> None:
        self.sessions, self.limits, self.model = sessions, limits, model
        self._journal, self._tokens, self._splicer = journal, tokens, splicer
        self._parser, self._maker, self._has_room = parser, maker, has_room
        self._pending: dict[tuple[str, str], asyncio.Task[Turn]] = {}
        # One thread: tokenizers are not made for several.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._noted: set[str] = set()
        self._undecided: dict[int, tuple[Turn, TokenVersions]] = {}
        """Turns that ended while a probe was pending, by their ids: this process alone knows which one."""
        self._requests: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Requests since the last batch that were answered with an error, by its code."""

    def beside(
        self, sessions: Sessions, journal: TurnJournal, maker: TurnMaker, limits: GatewayLimits
    ) -> "Gateway":
        """Return a gateway for other sessions of the same model; any number of groups may begin."""
        parts = self._tokens, self._splicer, self._parser
        made = Gateway(sessions, journal, *parts, maker, limits, lambda _: True, self.model)
        made._tokenizing = self._tokenizing
        return made

    # --- the driver -------------------------------------------------------------------------------------------

    async def open(self, asked: SessionRequest, *, has_room: bool = False) -> dict[str, Any]:
        """Return the session of an attempt, which begins unless it has begun.

        With `has_room`, the caller has found that another group may begin; what it found may have changed since.
        """
        if asked.group in self.sessions.over:
            raise conflict(f"the group is over: {self.sessions.over[asked.group]}")
        group = self.sessions.groups.get(asked.group)
        if group is None and not (has_room or self._has_room(len(self.sessions.groups))):
            raise not_now(TOO_MANY, "the trainer needs no further group yet", "no_room")
        if group is not None and group.task != asked.task:
            raise conflict(f"the group is of task {group.task}")
        now = group.rollouts.get(asked.rollout) if group is not None else None
        if now is not None and now.attempt == asked.attempt:
            await self._journal.barrier()
            return described(now)
        if now is not None and (now.attempt > asked.attempt or now.state == "rewarded"):
            raise conflict(f"attempt {now.attempt} of the rollout is {now.state}")
        name = secrets.token_hex(16)
        ids = {"group": asked.group, "task": asked.task, "rollout": asked.rollout, "attempt": asked.attempt}
        durable = self._record({"kind": "session", "session": name, **ids})
        session = self.sessions.by_id[name]
        await durable
        return described(session)

    async def reward(self, name: str, body: object) -> dict[str, Any]:
        """End a session with its reward; if it has one, that stays."""
        asked = RewardRequest.read(body)
        if asked.turns is not None and self.limits.segments == "last":
            text = (
                'explorer.gateway.segments = "last" trains one segment, which has no rewards of other turns'
            )
            raise refused(text, "turn_rewards")
        session = self._session(name)
        if session is None:
            return {"session": name, "state": self.sessions.ended[name]}
        if session.state == "open":
            if not session.turns or any(key[0] == name for key in self._pending):
                raise conflict("no turn was recorded" if not session.turns else "a turn is under way")
            turns = asked.of_turns(session)
            if problem := self.limits.reward_problem(asked.reward, turns or ()):
                raise refused(problem, "reward")
            rewards = {"reward": asked.reward, "info": asked.info, "turn_rewards": turns}
            turn = {"session": name, "group": session.group, "turns": len(session.turns)}
            await self._record({"kind": "reward", **turn, **rewards})
        else:
            await self._journal.barrier()
        return described(session)

    async def abandon(self, name: str) -> dict[str, Any]:
        """End a session so that nothing of it is trained; one that has its reward keeps it."""
        session = self._session(name)
        if session is None:
            return {"session": name, "state": self.sessions.ended[name]}
        if session.state == "open":
            await self._record({"kind": "abandon", "session": name, "group": session.group})
        return described(session)

    async def drop(self, group: str, why: str) -> None:
        """Give a group up, for a reason that is counted; one that is over stays as it is."""
        is_written = any(group in names for names in self.sessions.pending.values())
        if group in self.sessions.groups and not is_written:
            _LOG.warning("group_dropped", why=why, group=group)
            await self._record({"kind": "drop", "group": group, "why": why})

    async def drop_idle(self) -> None:
        before = time.monotonic() - self.limits.idle
        busy = {name for name, _ in self._pending}
        for group in list(self.sessions.groups.values()):
            is_busy = not busy.isdisjoint(session.id for session in group.rollouts.values())
            if group.touched_at < before and not is_busy and not group.is_whole(self.limits.group_size):
                await self.drop(group.name, "idle")

    def session(self, name: str) -> Mapping[str, Any]:
        session = self._session(name)
        return described(session) if session else {"session": name, "state": self.sessions.ended[name]}

    # --- the writer -------------------------------------------------------------------------------------------

    @property
    def failure(self) -> SyncdError | None:
        return self._journal.failure or self._maker.failure

    async def whole_groups(self, least: int, most: int, loads: Mapping[str, Unproven]) -> list[SessionGroup]:
        """Return up to `most` whole groups, nothing while there are fewer than `least`.

        Which of their tokens are doubted is decided now. A version's proof runs in the thread that calls this, so
        none is pending here, and nothing that is generated waits for one.
        """
        for turn, versions in self._undecided.values():
            turn.unproven = versions.settled(loads).unproven
        self._undecided.clear()
        groups = self.sessions.whole_groups(self.limits.group_size)[:most]
        return groups if len(groups) >= least else []

    async def begin_batch(self, number: int, groups: list[str]) -> bool:
        """Record which groups a batch is about to have; do nothing and return False if one was dropped meanwhile."""
        if not self.sessions.groups.keys() >= set(groups):
            return False
        await self._record({"kind": "batch", "number": number, "groups": groups})
        return True

    async def end_batch(self, groups: list[str]) -> dict[str, dict[str, int]]:
        """Record that they are written; return what was dropped and refused since the last batch, by reason."""
        figures = {"dropped": dict(self.sessions.dropped), "dropped_total": self.dropped()}
        refused, self.refused = dict(self.refused), Counter()
        await self._record({"kind": "written", "groups": groups, "reported": True})
        return {**figures, "refused": refused}

    def dropped(self) -> dict[str, int]:
        return dict(self.sessions.all_dropped())

    # --- agents -----------------------------------------------------------------------------------------------

    @contextmanager
    def admitted(self, name: str) -> Iterator[None]:
        self._opened(name)
        if self._requests[name] >= self.limits.max_turns:
            raise not_now(TOO_MANY, "the session has too many requests at once", "too_many_requests")
        self._requests[name] += 1
        try:
            yield
        finally:
            self._requests[name] -= 1
            if not self._requests[name]:
                del self._requests[name]

    async def turn(self, name: str, request: ChatRequest, key: str, *, is_retry: bool) -> Completion:
        """Return the answer, which is recorded; a retry, with the `key` of an earlier turn, gets the same answer."""
        session = self._opened(name)
        if is_retry and key in session.by_request:
            await self._journal.barrier()
            return await self._completion(session, session.by_request[key], request)
        with _limits_noted(session):
            task = self._pending.get((name, key)) if is_retry else None
            if task is None:
                task = self._started(session, request, key)
            # The client may give up waiting; the turn is recorded, for its retry.
            turn = await asyncio.shield(task)
        return await self._completion(session, turn, request)

    def _started(self, session: Session, request: ChatRequest, key: str) -> "asyncio.Task[Turn]":
        under_way = sum(name == session.id for name, _ in self._pending)
        if len(session.turns) + under_way >= self.limits.max_turns:
            raise refused(f"the session has had its {self.limits.max_turns} turns", code=_MAX_TURNS)
        if request.tools and self._parser.tool_format == "untold":
            raise refused("the model's chat template tells it of no tools", "tools")
        self._note(request)
        pending_key = (session.id, key)
        if pending_key in self._pending:  # a branch: the same request again, and no retry
            pending_key = (session.id, f"{key}/{secrets.token_hex(4)}")
        offered = {str(tool["function"]["name"]) for tool in request.tools}
        tools = session.tool_seconds(request.keys, offered, time.monotonic())
        task = asyncio.create_task(self._make(session, request, key, tools))
        self._pending[pending_key] = task
        task.add_done_callback(lambda done: self._ended(pending_key, done))
        return task

    def _ended(self, pending_key: tuple[str, str], task: "asyncio.Task[Turn]") -> None:
        del self._pending[pending_key]
        if not task.cancelled():
            task.exception()  # whoever waits gets it; if nobody does, that is no error of the program

    async def _make(
        self, session: Session, request: ChatRequest, key: str, tools: Mapping[str, float]
    ) -> Turn:
        limits = self.limits
        parent, added = await self._tokenized(self._prompt, session, request)
        prompt = [*(parent.whole if parent else ()), *added]
        if not 0 < len(prompt) <= limits.max_prompt_tokens:
            text = f"the prompt has {len(prompt)} tokens; the limit is {limits.max_prompt_tokens}"
            raise refused(text, "messages", _TOO_LONG)
        most = min(request.max_tokens or limits.max_tokens, limits.max_tokens)
        earlier = session.drawn_before(prompt, most, request.stop)
        if earlier is None:
            limit: int | None = most
            result = await self._maker.make(prompt, most)
        else:
            session.reserved.add(earlier)
            limit, result = session.earlier[earlier].most, self._drawn(session.earlier[earlier])
        record = await self._tokenized(self._turn_record, session, request, key, result)
        if session.state != "open" or session.id not in self.sessions.by_id:
            raise gone("the session has ended meanwhile")
        number = parent.number if parent else None
        fields = {"group": session.group, "number": len(session.turns), "parent": number}
        fields |= {"prompt": added, "earlier": earlier, "most": limit}
        durable = self._record({**record, **fields, **({"tools": tools} if tools else {})})
        turn = session.turns[-1]
        versions = result.versions_of(result.responses[0]).first(len(turn.tokens))
        if versions.pending is not None:
            self._undecided[id(turn)] = (turn, versions)
        await durable
        turn.answered_at = time.monotonic()
        return turn

    def _prompt(self, session: Session, request: ChatRequest) -> tuple[Turn | None, list[int]]:
        """Return the turn that a request continues, and the tokens after it; else all of its tokens."""
        try:
            return self._spliced(session, request)
        except PromptTooLongError as error:
            raise refused(str(error), "messages", _TOO_LONG) from error
        except ValueError as error:
            raise refused(str(error), "messages", "template_error") from error

    def _spliced(self, session: Session, request: ChatRequest) -> tuple[Turn | None, list[int]]:
        continued = session.continued(request.keys)
        if continued is None:
            return None, self._splicer.prompt(request)
        at, turn = continued
        if self.limits.history == "template":
            whole, before = self._splicer.prompt(request), turn.whole
            return (turn, whole[len(before) :]) if whole[: len(before)] == before else (None, whole)
        added = self._splicer.continuation(request, at, turn.tokens[-1])
        return (turn, added) if added else (None, self._splicer.prompt(request))

    def _turn_record(
        self, session: Session, request: ChatRequest, key: str, result: GroupResult
    ) -> dict[str, Any]:
        response = result.responses[0]
        ended = response.tokens[-1] in self._splicer.ends
        said = response.tokens[:-1] if ended else response.tokens
        cut = cut_at_stop(said, request.stop, self._tokens.raw_text)
        text = self._tokens.raw_text(said) if cut is None else cut.text
        answer = self._parser.parse(text, tools=request.tools, is_whole=ended or cut is not None)
        size = len(response.tokens) if cut is None else cut.tokens
        versions = result.versions_of(response).first(size)
        return {
            "kind": "turn",
            "session": session.id,
            "request": key,
            "history": next_key(request.keys[-1], answer.message),
            "tokens": list(response.tokens[:size]),
            "logprobs": list(response.logprobs[:size]),
            "spans": [list(span) for span in versions.spans],
            "unproven": None if versions.unproven is None else list(map(bool, versions.unproven)),
            "answer": {
                "content": answer.content,
                "reasoning": answer.reasoning,
                "calls": {name: list(call) for name, call in answer.calls.items()},
                "finish": answer.finish,
            },
            **({"stop": list(request.stop)} if request.stop else {}),
        }

    def _drawn(self, turn: Turn) -> GroupResult:
        _, versions = self._undecided.get(id(turn), (turn, TokenVersions(tuple(turn.spans), turn.unproven)))
        return GroupResult(0, (Response(turn.tokens, turn.logprobs, versions=versions),))

    async def _completion(self, session: Session, turn: Turn, request: ChatRequest) -> Completion:
        usage = Usage(turn.length - len(turn.tokens), len(turn.tokens))
        logprobs = await self._tokenized(self._logprobs, turn) if request.logprobs else None
        name = session.answer_id(turn)
        return Completion(name, self.model, int(time.time()), turn.answer, usage, logprobs)

    def _logprobs(self, turn: Turn) -> list[TokenLogprob]:
        texts = [self._tokens.raw_text([token]) for token in turn.tokens]
        return list(map(TokenLogprob, texts, turn.logprobs))

    def _note(self, request: ChatRequest) -> None:
        if new := set(request.replaced) - self._noted:
            _LOG.info("sampling_replaced", settings=sorted(new))
        if new_tolerated := set(request.tolerated) - self._noted:
            _LOG.info("fields_tolerated", fields=sorted(new_tolerated))
        self._noted |= new | new_tolerated

    async def _tokenized(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call, *args)

    def _record(self, record: dict[str, Any]) -> "asyncio.Future[None]":
        """Take a record, and return what is there once it is durable."""
        durable = self._journal.append(record)
        self.sessions.apply(record, time.monotonic())
        return durable

    def _opened(self, name: str) -> Session:
        session = self._session(name)
        if session is None or session.state != "open":
            raise gone(f"the session is {session.state if session else self.sessions.ended[name]}")
        return session

    def _session(self, name: str) -> Session | None:
        """Return a session, None if its group is over."""
        session = self.sessions.by_id.get(name)
        if session is None and name not in self.sessions.ended:
            raise missing("there is no such session")
        return session


@contextmanager
def _limits_noted(session: Session) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        session.limit = _LIMITS.get(error.code, "")
        raise
    session.limit = ""
