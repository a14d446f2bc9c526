"""Generation by a server: several groups at a time, each with the versions that ran before and after it."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Iterated
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from explorer_hooks.explorer import completions
from explorer_hooks.explorer.completions import LackingError, MalformedError
from explorer_hooks.explorer.generation import (
    Applied,
    Ask,
    Generator,
    Made,
    Rollout,
    version_after,
    version_of,
)
from explorer_hooks.hook import Running
from explorer_hooks.http_client import HttpClient, Reply
from syncd.errors import ConfigError, EngineUnreachableError, SyncdError

TICK = 0.05
"""Seconds between two looks at what has come."""

_BACKOFF, _LONGEST = 0.5, 15.0
_SETTLE = 0.1
"""Seconds between two questions to an engine that is being loaded."""

_CONFIRM = 2.0
"""Seconds between an engine's new version and its confirmation, at most; a longer difference is a restart."""

_TOO_MANY, _SERVER_ERROR, _TIMED_OUT = 429, 500, 408


@dataclass(frozen=True, slots=True)
class Calls:
    """How a server is asked.

    Args:
        server: The server.
        model: What requests call the model.
        running: Asks the engine what it runs; called by several threads.
        retries: Further attempts of one request.
        settle: Seconds that a group waits for an engine that is being loaded.
    """

    server: HttpClient
    model: str
    running: Callable[[], Running]
    retries: int = 4
    settle: float = 60.0


class Served(Generator):
    """Generates by a server.

    Args:
        calls: How it is asked.
        concurrency: Groups that are asked for at a time.
        applied: The version that work may be done with.
        stop: Once true, what is in hand is given up.
    """

    def __init__(self, calls: Calls, *, concurrency: int, applied: Applied, stop: Callable[[], bool]) -> None:
        self._calls, self._concurrency, self._applied, self._stop = calls, concurrency, applied, stop

    def generate(self, asks: Sequence[Ask]) -> "Iterated[Made | None]":
        """Yield each group once, as it is done, and None every so often."""
        waiting: SimpleQueue[tuple[int, Ask]] = SimpleQueue()
        done: SimpleQueue[Made | SyncdError] = SimpleQueue()
        for asked in enumerate(asks):
            waiting.put(asked)
        given_up = threading.Event()
        for _ in range(min(self._concurrency, len(asks))):
            # They are not waited for: what they wait for may take as long as a response.
            work = threading.Thread(target=self._work, args=(waiting, done, given_up), daemon=True)
            work.start()
        try:
            yield from self._come(done, len(asks))
        finally:
            given_up.set()

    def _come(self, done: "SimpleQueue[Made | SyncdError]", count: int) -> Iterator[Made | None]:
        while count and not self._stop():
            try:
                one = done.get(timeout=TICK)
            except Empty:
                yield None
                continue
            if isinstance(one, SyncdError):
                raise one
            count -= 1
            yield one

    def _work(
        self,
        waiting: "SimpleQueue[tuple[int, Ask]]",
        done: "SimpleQueue[Made | SyncdError]",
        given_up: threading.Event,
    ) -> None:
        while not given_up.is_set():
            try:
                place, ask = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put(self._made(place, ask, given_up))
            except SyncdError as error:
                done.put(error)
            except Exception as error:  # noqa: BLE001 - a thread that ends silently would be waited for
                done.put(SyncdError(f"asking the engine failed: {error!r}"))

    def _made(self, place: int, ask: Ask, given_up: threading.Event) -> Made:
        try:
            first = self._first(given_up)
            if first is None:
                return Made(place, problem="the engine is not on an applied version", again=True)
            rollouts = self._asked(ask, given_up)
            last = version_after(self._calls.running(), first)
        except EngineUnreachableError as error:
            return Made(place, problem=str(error), again=True)
        except MalformedError as error:
            return Made(place, problem=str(error))
        if last is None:
            return Made(place, problem="the engine was restarted meanwhile", again=True)
        return Made(place, rollouts, first, last)

    def _first(self, given_up: threading.Event) -> "tuple[int, int] | None":
        """Return the version that work begins with; while it is being loaded, wait for it."""
        begin = time.monotonic()
        while True:
            running = self._calls.running()
            found = version_of(running, self._applied())
            patience = self._calls.settle if running.paused else min(self._calls.settle, _CONFIRM)
            if found is not None or time.monotonic() - begin > patience or given_up.wait(_SETTLE):
                return found

    def _asked(self, ask: Ask, given_up: threading.Event) -> tuple[Rollout, ...]:
        """Ask until there is an answer, a bounded number of times.

        Raises:
            EngineUnreachableError: The server was away each time.
            MalformedError: The last answer was not usable, or the request is refused.
            ConfigError: The server cannot say what is needed.
        """
        body = completions.request(ask, self._calls.model)
        for attempt in range(self._calls.retries + 1):
            if attempt and given_up.wait(pause(attempt)):
                raise EngineUnreachableError("given up")
            try:
                return completions.rollouts(self._answer(body), ask)
            except (EngineUnreachableError, MalformedError) as error:
                if attempt == self._calls.retries or isinstance(error, RefusedRequestError):
                    raise
            except LackingError as error:
                raise ConfigError(str(error), path=self._calls.server.address) from error
        raise AssertionError("the loop returns or raises")

    def _answer(self, body: dict[str, object]) -> "dict[str, object] | None":
        reply = self._calls.server.post_any(completions.PATH, body)
        if is_passing(reply):
            raise EngineUnreachableError(self._calls.server.complaint(reply))
        if reply.is_error:
            raise RefusedRequestError(self._calls.server.complaint(reply))
        return reply.document


class RefusedRequestError(MalformedError):
    """The server will never take this request: a prompt that is too long, for one."""


def is_passing(reply: Reply) -> bool:
    """Say whether another attempt may be answered better."""
    return reply.status in {_TOO_MANY, _TIMED_OUT} or reply.status >= _SERVER_ERROR


def pause(attempt: int) -> float:
    """Return the seconds before a further attempt, spread so that explorers do not come back together."""
    return min(_BACKOFF * 2.0 ** (attempt - 1), _LONGEST) * random.uniform(0.8, 1.2)  # noqa: S311


def served_model(server: HttpClient) -> str:
    """Return what a server calls its first model.

    Raises:
        ConfigError: It names none.
        EngineUnreachableError: It does not answer.
    """
    found = server.get_json("/v1/models").get("data")
    first = found[0] if isinstance(found, list) and found else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("the server names no model", path=server.address, hint="set explorer.engine.model")
    return name
