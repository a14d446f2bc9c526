"""One monitor in a thread of its own: it may raise, be slow or hang, and training goes on.

The thread is a daemon: a monitor that never returns does not keep the process from ending either.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import structlog

from syncd.errors import ConfigError
from trainer.monitors.base import Monitor

LIMIT = 256
"""Calls that wait for a monitor; further ones are dropped and counted."""

PATIENCE = 5
"""Failures in a row after which a monitor is switched off."""

Call = Callable[[Monitor], None]


class Behind:
    """Hands calls to a monitor that its own thread makes and uses.

    Args:
        kind: The monitor's name, for the log.
        make: Makes it; called again before the next call if it raised.
        limit: Calls that wait.
        patience: Failures in a row after which it is switched off.
    """

    def __init__(
        self, kind: str, make: Callable[[], Monitor], *, limit: int = LIMIT, patience: int = PATIENCE
    ) -> None:
        self._kind, self._make, self._limit, self._patience = kind, make, limit, patience
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._monitor: Monitor | None = None
        self._row, self._off = 0, False
        self._made = threading.Event()
        self._refused: ConfigError | None = None
        self.failures = self.dropped = 0
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._work, name=f"monitor-{kind}", daemon=True)
        self._thread.start()

    def ready(self, timeout: float) -> None:
        """Wait for the monitor to be made, not longer than `timeout` seconds.

        Raises:
            ConfigError: It refuses its options.
        """
        self._made.wait(timeout)
        if self._refused is not None:
            raise self._refused

    def put(self, call: Call) -> None:
        """Let the monitor's thread make a call when it gets to it; never waits."""
        if self._off:
            return
        if self._calls.qsize() < self._limit:
            self._calls.put(call)
            return
        self.dropped += 1
        if self.dropped == 1:
            self._log.warning("monitor_fell_behind", detail="figures for it are dropped", monitor=self._kind)

    def end(self) -> None:
        """Say that nothing more comes."""
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait for it to write out what it has, not longer than `timeout` seconds."""
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            self._log.warning(
                "monitor_close_timed_out", detail="it may lack the last figures", monitor=self._kind
            )

    def _work(self) -> None:
        self._try(lambda _: None)
        self._made.set()
        for call in iter(self._calls.get, None):
            if not self._off:
                self._try(call)
        if self._monitor is not None:
            self._try(lambda monitor: monitor.close())

    def _try(self, call: Call) -> None:
        try:
            if self._monitor is None:
                self._monitor = self._make()
            call(self._monitor)
        except ConfigError as error:
            self._refused = error
            self._failed(error)
        except Exception as error:  # noqa: BLE001 -- whatever a service's library raises
            self._failed(error)
        else:
            self._row = 0

    def _failed(self, error: Exception) -> None:
        self.failures, self._row = self.failures + 1, self._row + 1
        reason = f"{type(error).__name__}: {error}"
        if self.failures == 1:
            self._log.warning("monitor_failed", monitor=self._kind, reason=reason)
        if self._row == self._patience:
            self._off = True
            self._log.warning("monitor_disabled", monitor=self._kind, reason=reason)
