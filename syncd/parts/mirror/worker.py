"""Repeats an iteration until it is told to stop; what fails is said once for each reason and tried again."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncd.errors import StorageError, SyncdError, storage_error, unexpected
from syncd.observe import event_names
from syncd.parts.mirror.decisions import next_wait
from syncd.parts.mirror.ends import OvertakenError
from syncd.parts.mirror.meter import StoppedError
from syncd.protocol.disk import is_below
from syncd.protocol.mount import MountTrouble, mount_trouble_of


@dataclass(frozen=True, slots=True)
class Work:
    name: str  # versions or experiences
    turn: Callable[[], bool]  # does one thing; returns whether there was something to do
    every: float  # seconds between two iterations without anything to do
    failed: Callable[[str], None] = lambda _: None  # told why an iteration failed
    roots: tuple[str, ...] = ()  # the directories whose mounts may be what fails


class Worker:
    """Repeats a work until `stop` is set; `tell` hears events."""

    def __init__(self, work: Work, tell: Callable[..., None], stop: threading.Event) -> None:
        self._work, self._tell, self._stop = work, tell, stop
        self._failures, self._reason = 0, ""
        self.error: SyncdError | None = None
        """Why the last iteration failed, None if it did not."""

    def run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self.step())

    def run_once(self) -> None:
        """Repeat the work until nothing is left to do; raise the first error."""
        while not self._stop.is_set():
            wait = self.step()
            if self.error is not None:
                raise self.error
            if wait > 0:
                return

    def step(self) -> float:
        """Do one iteration, and return the seconds until the next one is due."""
        try:
            is_busy = self._work.turn()
        except (StoppedError, OvertakenError):
            return 0.0
        except SyncdError as error:
            return self._fail(error)
        except OSError as error:
            return self._fail(storage_error(error, error.filename or next(iter(self._work.roots), None)))
        except Exception as error:  # noqa: BLE001 - a bug must be seen, and must not end a service
            return self._fail(unexpected(error))
        self._recover()
        return 0.0 if is_busy else self._work.every

    def _fail(self, error: SyncdError) -> float:
        self._failures += 1
        wait, self.error = next_wait(self._failures), error
        trouble = self._mount_trouble(error)
        hint = error.hint or (trouble.hint if trouble else None)
        detail = f"{trouble.state}: {error}" if trouble else str(error)
        if detail != self._reason:
            self._reason = detail
            fields: dict[str, Any] = {
                "work": self._work.name,
                "code": error.code,
                "detail": detail,
                "hint": hint,
            }
            self._tell(event_names.MIRROR_FAILED, "warning", **fields, retry_in=wait)
        self._work.failed(detail)
        return wait

    def _mount_trouble(self, error: SyncdError) -> MountTrouble | None:
        """Return what an error of the system says of a mount; a store is none."""
        if not isinstance(error, StorageError) or error.errno is None:
            return None
        root = next((root for root in self._work.roots if is_below(error.path or root, root)), None)
        return mount_trouble_of(error, root) if root else None

    def _recover(self) -> None:
        if self.error is not None:
            self._tell(event_names.MIRROR_RECOVERED, "info", work=self._work.name, after=self._reason)
        self._failures, self._reason, self.error = 0, "", None
