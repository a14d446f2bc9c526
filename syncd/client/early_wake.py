"""What ends a pause between two polls early: on a network mount, a look at where versions come from."""

import contextlib
from collections.abc import Callable

from syncd.client.rhythm import NameChanges, Rhythm
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job, parse_attempt_name, parse_step_name
from syncd.protocol.version import Version


class VersionLookout:
    """Looks for the next version of a job between two polls."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock, self._rhythm = job, clock, Rhythm()
        self._versions, self._steps = NameChanges(job.disk, job.state), NameChanges(job.disk, job.root)
        self._read: Version | None = None
        self._coming: list[str] = []

    def note(self, version: Version) -> None:
        if self._read is None or version.pair != self._read.pair:
            self._rhythm.note_version(self._clock.monotonic())
        self._read = version

    def wait(self, seconds: float, sleep: Callable[[float], None]) -> None:
        """Sleep until a version may have come, `seconds` at most."""
        clock, ends = self._clock, self._clock.monotonic() + seconds
        with contextlib.suppress(OSError):  # the next poll meets it, too, and reports it
            self._look_for_steps()
        while (left := ends - (now := clock.monotonic())) > 0:
            sleep(min(self._rhythm.look_after(now, seconds), left))
            with contextlib.suppress(OSError):
                if self._versions.look():
                    return

    def _look_for_steps(self) -> None:
        """Find the attempts, and the steps above the version that was read; list a job that has changed."""
        if self._steps.look():
            entries = self._job.disk.list(self._job.root)
            self._coming = [entry.name for entry in entries if entry.kind == "directory"]
        self._coming = [name for name in self._coming if self._is_coming(name)]
        self._rhythm.note_unpublished(self._clock.monotonic(), self._coming)

    def _is_coming(self, name: str) -> bool:
        step, newest = parse_step_name(name), -1 if self._read is None else self._read.step
        return parse_attempt_name(name) is not None or (step is not None and step > newest)
