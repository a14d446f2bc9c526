"""Runs the gathers of one version in the background: of a long chain only a few at once.

All at once would be thousands of threads and connections. They take turns in the order in which they were begun,
which is the same on all hosts, so hosts do not wait for each other in a circle.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from syncd.parts.hosts.gather import Gather, Tally
from syncd.parts.hosts.threads import thread_shortage_passes

AT_ONCE = 2  # while one waits for its last pieces, the next goes on


class GatherPool:
    """Gathers that end together: an error gives up all of them.

    Args:
        stop: Polled by each.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop, self._given_up = stop, threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gather")

    @contextlib.contextmanager
    def running(self, gather: Gather) -> Iterator[Future[Tally]]:
        """Run a gather while the block lasts."""
        running = self._begin(gather)
        try:
            yield running
        except BaseException:
            self._given_up.set()
            raise
        finally:
            wait([running])

    def close(self) -> None:
        self._pool.shutdown()

    def _begin(self, gather: Gather) -> Future[Tally]:
        try:
            with thread_shortage_passes():
                return self._pool.submit(gather.run, self._is_stopped)
        except BaseException:
            self._given_up.set()  # it may be in the queue all the same
            gather.end()
            raise

    def _is_stopped(self) -> bool:
        return self._given_up.is_set() or self._stop()
