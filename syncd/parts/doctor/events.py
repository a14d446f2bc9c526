"""The probe of change events: whether a replaced file wakes a watcher, and how soon."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from syncd.parts.doctor.probe import (
    Finding,
    ProbeTarget,
    errno_name,
    milliseconds,
    ok,
    percentile,
    probe,
    warn,
)

PATIENCE = 1.0  # seconds in which an event must come

_ROUNDS = 5


class Listener(FileSystemEventHandler):
    """Wakes a waiting thread when a change of one path is reported."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._heard = threading.Event()

    def on_any_event(self, event: FileSystemEvent) -> None:
        if self._path in (os.fsdecode(event.src_path), os.fsdecode(event.dest_path)):
            self._heard.set()

    def arm(self) -> None:
        self._heard.clear()

    def wait(self, seconds: float = PATIENCE) -> bool:
        return self._heard.wait(seconds)


@contextlib.contextmanager
def listening(path: str) -> Iterator[Listener]:
    """Listen for changes of a file with the watcher that the daemon uses."""
    listener, observer = Listener(path), Observer()
    observer.schedule(listener, os.path.dirname(path), recursive=False)
    observer.start()
    try:
        yield listener
    finally:
        observer.stop()
        observer.join(5)


@probe("events")
def local_events(target: ProbeTarget) -> Finding:
    """Whether changes of this host raise events here; only a second host can tell whether its own do."""
    try:
        delays = event_delays(target, f"{target.scratch}/file")
    except OSError as error:
        advice = "sysctl -w fs.inotify.max_user_watches=524288 fs.inotify.max_user_instances=1024"
        return warn(f"cannot watch ({errno_name(error)}): changes are found by polling", advice)
    if lost := _ROUNDS - len(delays):
        return warn(f"{lost} of {_ROUNDS} changes raised no event: changes are found by polling")
    scope = " made on this host; other hosts' changes raise none" if target.mount.is_network else ""
    middle, slowest = percentile(delays, 50), max(delays)
    figures = {"p50_ms": round(middle * 1000, 3), "max_ms": round(slowest * 1000, 3)}
    return ok(f"p50 {milliseconds(middle)} after a change{scope}", figures)


def event_delays(target: ProbeTarget, path: str) -> list[float]:
    """Return the seconds from each change to its event, for those that raised one."""
    target.disk.replace(path, b"0")
    with listening(path) as listener:
        delays = [_delay(path, listener, number) for number in range(_ROUNDS)]
    return [delay for delay in delays if delay is not None]


def _delay(path: str, listener: Listener, number: int) -> float | None:
    temporary = f"{path}.{number}"
    with open(temporary, "wb") as file:
        file.write(b"x")
    time.sleep(0.02)
    listener.arm()
    began = time.monotonic()
    os.replace(temporary, path)
    return time.monotonic() - began if listener.wait() else None
