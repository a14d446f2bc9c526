"""What wakes the daemon: changes in the job directory where the kernel reports them, signals, and time.

Events only wake the scanner; the daemon never relies on what they say. A network mount raises none for the changes of
other hosts, so there the daemon polls, and looks in between while a step is near. Where events should come but a scan
finds news that none announced, it polls too.
"""

import contextlib
import os
import random
import select
import signal
from collections.abc import Callable, Collection, Hashable
from typing import Any, Literal

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify import InotifyEmitter
from watchdog.observers.inotify_c import InotifyConstants

from syncd.client.rhythm import NameChanges, Rhythm
from syncd.protocol.disk import Clock
from syncd.protocol.layout import MARKER, TRACKER, Job
from syncd.protocol.mount import Mount, mount_of
from syncd.stall.calls import TrackCall, untracked

Mode = Literal["events", "polling"]

# What the daemon itself does, opening and closing the directory, must not wake it.
_EVENTS: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
]

_MISSES = 2  # changes that no event announced after which events are no longer relied on


class WakePipe:
    """A self-pipe: any thread and any signal handler may ring it, the main thread waits on it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def ring(self) -> None:
        """Wake the waiter; a full pipe has woken it already."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether it rang, and forget all rings."""
        if not self._poll.poll(max(seconds, 0.0) * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        return True

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Watcher:
    """Wakes on changes of a job directory.

    Args:
        mode: `events` or `polling` to force one, None to choose by the file system.
        attend: Notes each call of the file system while it runs.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        pipe: WakePipe,
        mode: Mode | None = None,
        on_rebuilt: Callable[[], None] = lambda: None,
        attend: TrackCall = untracked,
    ) -> None:
        self._root, self._clock, self._pipe = job.root, clock, pipe
        self._on_rebuilt, self._attend = on_rebuilt, attend
        self._names, self._rhythm = NameChanges(job.disk, job.root), Rhythm()
        self._waited_until = clock.monotonic()
        self._observer: BaseObserver | None = None
        self._rang = False
        self._misses = 0
        self._random = random.Random()  # noqa: S311 - spreads load, hides nothing
        with attend("find", job.root):
            self.mount = mount_of(job.root)
        self.mode, self.reason = choose_watch_mode(mode, self.mount)
        if self.mode == "events":
            self._start()

    def wait(self, seconds: float) -> bool:
        """Wait `seconds` at most for an event, a signal or, while polling, changed names; return whether one came."""
        self._replace_dead_emitter()
        if self.mode == "polling":
            # Spread, so that many daemons do not beat in step.
            return self._wait_looking(seconds * self._random.uniform(0.9, 1.1))
        self._rang = self._pipe.wait(seconds)
        return self._rang

    def _wait_looking(self, seconds: float) -> bool:
        clock, began = self._clock, self._clock.monotonic()
        # The first look comes as long after the scan as that took: steps that come one after the other take half the
        # daemon's time at most.
        rests, ends = began + min(began - self._waited_until, seconds), began + seconds
        try:
            while (left := ends - (now := clock.monotonic())) > 0:
                pause = max(self._rhythm.look_after(now, seconds), rests - now)
                if self._pipe.wait(min(pause, left)) or self._names.look():
                    return True
        except OSError:
            return False  # the next scan meets it, too, and reports it
        finally:
            self._waited_until = clock.monotonic()
        return False

    def note_unpublished(self, steps: Collection[Hashable]) -> None:
        """Note what a scan found of steps that are not published: while they grow, the next version is near."""
        self._rhythm.note_unpublished(self._clock.monotonic(), steps)

    def found_news(self) -> None:
        """Note that a scan found the marker changed: no event announced it if nothing rang."""
        self._rhythm.note_version(self._clock.monotonic())
        if self.mode != "events" or self._rang:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= _MISSES:
            self.close()
            self.mode, self.reason = "polling", "changes came without events"

    def _start(self) -> None:
        observer = BaseObserver(_Emitter)
        try:
            observer.schedule(_Handler(self._pipe.ring), self._root, recursive=False, event_filter=_EVENTS)
            with self._attend("watch", self._root):
                observer.start()
        except OSError as error:
            self.mode, self.reason = "polling", f"no events: {error.strerror}"
        else:
            self._observer = observer

    def close(self) -> None:
        if self._observer is not None:
            self._observer.unschedule_all()
            self._observer.stop()
            self._observer.join(5)
            self._observer = None

    def _replace_dead_emitter(self) -> None:
        """Replace a dead emitter: the observer stays alive when the watched directory goes, and reports nothing."""
        if self.mode != "events":
            return
        observer = self._observer
        if observer and observer.emitters and all(emitter.is_alive() for emitter in observer.emitters):
            return
        with self._attend("stat", self._root):
            if not os.path.isdir(self._root):
                return
        self.close()
        self._start()
        self._on_rebuilt()


def choose_watch_mode(mode: Mode | None, mount: Mount) -> tuple[Mode, str]:
    if mode is not None:
        return mode, "asked for"
    if mount.is_network:
        return "polling", f"{mount.type} raises no events for other hosts' changes"
    return "events", f"{mount.type} is local"


class Signals:
    """SIGTERM and SIGINT ask to stop, SIGHUP to reload; each rings the pipes at once."""

    def __init__(self, *pipes: WakePipe) -> None:
        self.stop = self.reload = False
        self._pipes = pipes
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: Any) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        else:
            self.stop = True
        # One waiter is this same thread: its poll resumes after this handler, and finds the pipe rung.
        for pipe in self._pipes:
            pipe.ring()


class _Emitter(InotifyEmitter):
    """Reports what arrives, not what is moved away.

    The library holds a move away back for half a second, to pair it with an arrival, and all later events behind it.
    Each pruning moves a step away, so the next marker would be noticed half a second late.
    """

    def get_event_mask_from_filter(self) -> Any:
        return super().get_event_mask_from_filter() & ~InotifyConstants.IN_MOVED_FROM


class _Handler(FileSystemEventHandler):
    """Rings for what may be news: the marker, the tracker, and directories that come or go."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    def on_any_event(self, event: FileSystemEvent) -> None:
        names = {os.path.basename(os.fsdecode(path)) for path in (event.src_path, event.dest_path) if path}
        if event.is_directory or names & {MARKER, TRACKER}:
            self._ring()
