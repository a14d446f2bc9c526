"""Answers of the engine: requests of many sessions wait here for the generator that `explorer run` uses too."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from explorer_hooks.parts.agents.api_errors import UNAVAILABLE, ApiError, not_now, refused
from explorer_hooks.run.generation import Generator, GroupRequest, GroupResult
from syncd.errors import EngineDeadError, EngineUnreachableError, SyncdError

AWAY = "engine_away"  # the code of the error that says that a turn has waited in vain for the engine
ENGINE_REFUSED = "engine_refused"  # the code of the error that says that the engine does not take a prompt
_PAUSE = 0.2  # seconds until an engine that could not answer is asked again

_SHOWN = 300

Done = Callable[[GroupResult | ApiError], None]


@dataclass(frozen=True, slots=True, eq=False)
class WaitingTurn:
    request: GroupRequest  # its prompt, and how long the answer may be
    done: Done  # called with the result
    until: float  # when it is given up, on the monotonic clock


class TurnMaker:
    """Has an engine generate turns, by so many `threads`; a turn waits `hold` seconds for an engine that is away.

    A call of the generator has `rows` turns at most, with the same limit of tokens.
    """

    def __init__(
        self, generator: Generator, *, threads: int, rows: int, hold: float, temperature: float
    ) -> None:
        self._generator, self._rows, self._hold = generator, rows, hold
        self._temperature, self._most_threads = temperature, threads
        self._waiting: deque[WaitingTurn] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._started = self._idle = 0
        self.failure: SyncdError | None = None  # why the engine can answer nothing any more

    def make(self, prompt: Sequence[int], max_tokens: int) -> "asyncio.Future[GroupResult]":
        """Return the engine's answer once it is there, of `max_tokens` tokens at most. Called in an event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GroupResult] = loop.create_future()

        def done(result: GroupResult | ApiError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, future, result)

        request = GroupRequest(prompt, 1, max_tokens, self._temperature)
        self._put([WaitingTurn(request, done, time.monotonic() + self._hold)])
        return future

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, turns: Sequence[WaitingTurn]) -> None:
        with self._changed:
            self._waiting.extend(turns)
            self._changed.notify(len(turns))
            if len(self._waiting) > self._idle and self._started < self._most_threads:
                self._started += 1
                # Nobody waits for these threads: each may wait as long as a response takes.
                threading.Thread(target=self._work, name="turns", daemon=True).start()

    def _work(self) -> None:
        while turns := self._taken():
            again = self._generate(turns)
            if again:
                time.sleep(_PAUSE)
                self._put(again)

    def _taken(self) -> list[WaitingTurn]:
        with self._changed:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if self._closed:
                return []
            most = self._waiting[0].request.max_tokens
            taken = [turn for turn in self._waiting if turn.request.max_tokens == most][: self._rows]
            for turn in taken:
                self._waiting.remove(turn)
            return taken

    def _generate(self, turns: Sequence[WaitingTurn]) -> list[WaitingTurn]:
        left = dict(enumerate(turns))
        problem = "the engine gave no answer"
        try:
            with closing(self._generator.generate([turn.request for turn in turns])) as results:
                for result in results:
                    if result is not None and result.retry:
                        problem = result.problem
                    elif result is not None:
                        left.pop(result.index).done(_answer(result))
        except EngineUnreachableError as error:
            problem = str(error)
        except SyncdError as error:
            self.failure, problem = error, str(error)
        except Exception as error:  # noqa: BLE001 - whoever waits for these turns would wait for ever
            self.failure = _broken(error)
            problem = str(self.failure)
        now = time.monotonic()
        for turn in [turn for turn in left.values() if now > turn.until or self.failure]:
            turn.done(not_now(UNAVAILABLE, f"the engine is away: {problem}", AWAY))
        return [turn for turn in left.values() if now <= turn.until and not self.failure]


def _broken(error: Exception) -> EngineDeadError:
    """Return the failure that an error means that is not of this project's tree, such as one of torch."""
    hint = "nvidia-smi, or syncd verify JOB --deep; then start it again"
    return EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"[:_SHOWN], hint=hint)


def _answer(result: GroupResult) -> GroupResult | ApiError:
    if result.problem:
        return refused(f"the engine refuses it: {result.problem}", "messages", ENGINE_REFUSED)
    return result


def _resolve(future: "asyncio.Future[GroupResult]", result: GroupResult | ApiError) -> None:
    if future.cancelled():
        return
    if isinstance(result, ApiError):
        future.set_exception(result)
    else:
        future.set_result(result)
