"""Questions that several threads ask, and whose answers one thread takes as they come."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from syncd.context import Closing
from syncd.errors import SyncdError

TICK = 0.05  # seconds between two polls for answers

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class AskingThreads(Closing, Generic[_Question, _Answer]):
    """Threads that nobody waits for: each may wait as long as an answer takes.

    `ask` returns the answer to a question, and may give up once the event is set; errors name what is asked as `who`.
    """

    def __init__(self, ask: Callable[[_Question, threading.Event], _Answer], threads: int, who: str) -> None:
        self._ask, self._threads, self._who = ask, threads, who
        self._given_up, self._pending = threading.Event(), 0
        self._waiting: SimpleQueue[_Question | None] = SimpleQueue()
        self._done: SimpleQueue[_Answer | SyncdError] = SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._work, name=who, daemon=True).start()

    @property
    def is_pending(self) -> bool:
        return self._pending > 0

    def put(self, question: _Question) -> None:
        self._pending += 1
        self._waiting.put(question)

    def next(self, seconds: float = 0.0) -> _Answer | None:
        """Return the next answer, None if none comes in so many seconds."""
        try:
            answer = self._done.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(answer, SyncdError):
            raise answer
        self._pending -= 1
        return answer

    def close(self) -> None:
        """End the threads, each after the answer that it waits for."""
        self._given_up.set()
        for _ in range(self._threads):
            self._waiting.put(None)

    def _work(self) -> None:
        while (question := self._waiting.get()) is not None and not self._given_up.is_set():
            try:
                self._done.put(self._ask(question, self._given_up))
            except SyncdError as error:
                self._done.put(error)
            except Exception as error:  # noqa: BLE001 - whoever takes the answers would wait for ever
                self._done.put(SyncdError(f"asking {self._who} failed: {error!r}"))
