"""What dead leaders have left in their trash, where a full disk keeps everybody from leading.

A claim writes a file. On a full disk none can be written, and the space is in the trash, which a leader empties. So
a candidate empties it first. It leads nothing and fences nobody, so it must do no harm to a leader that was only
silent:

- It deletes nothing that it has not seen in the trash for the whole grace time.
- A step that anybody leases or pins is put back, as a leader does. Whoever has a presence counts as alive.
- It renames an entry before it deletes it. A leader that wakes up and wants to put that step back no longer finds
  it: a step is never put back half deleted.
"""

import contextlib
import uuid
from collections.abc import Iterator

from syncd.daemon.leases import read_held
from syncd.protocol.disk import Clock, exists, list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.leadership import is_private, parse_token


class Leftovers:
    """Empties the trash of terms whose place is free.

    Args:
        job: The job.
        clock: This host's clock.
    """

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock = job, clock
        self._since: dict[str, float] = {}

    def empty(self, highest: int, grace: float) -> int:
        """Delete what earlier leaders have left, and return how many files; what cannot go yet stays for later.

        Args:
            highest: The highest term whose place was seen to be free.
            grace: Seconds that removed steps stay, from when they are seen here first.
        """
        there = self._entries(highest)
        now = self._clock.monotonic()  # after the listing: nothing is older than the first look that saw it
        self._since = {path: self._since.get(path, now) for path in there}
        due = [path for path in there if now - self._since[path] >= grace]
        return sum(self._delete(path) for path in due)

    def _entries(self, highest: int) -> list[str]:
        tokens = [
            entry for entry in list_if_there(self._job.disk, self._job.trash) if entry.kind == "directory"
        ]
        terms = [entry.name for entry in tokens if 0 < (parse_token(entry.name) or 0) <= highest]
        return [path for name in terms for path in self._in_trash(f"{self._job.trash}/{name}")]

    def _in_trash(self, trash: str) -> Iterator[str]:
        """Yield what lies in a term's trash: in the directory of its claim; right there by earlier releases."""
        for entry in list_if_there(self._job.disk, trash):
            if is_private(entry):
                yield from self._in_trash(f"{trash}/{entry.name}")
            else:
                yield f"{trash}/{entry.name}"

    def _delete(self, path: str) -> int:
        try:
            if self._is_rescued(path):
                return 0
            mine = f"{path.rpartition('/')[0]}/dead-{uuid.uuid4().hex[:8]}"
            self._job.disk.rename(path, mine)
            return remove_tree(self._job.disk, mine)
        except OSError:
            return 0  # somebody else was faster, or it cannot go yet

    def _is_rescued(self, path: str) -> bool:
        """Put a step back if it is leased or pinned, and say whether it must not be deleted."""
        found = step_in_trash(path.rpartition("/")[2])
        if found is None:
            return False
        directory, step = found
        place = f"{self._job.root}/{directory}"
        if exists(self._job.disk, place) or read_held(self._job, {}).why(step) is None:
            return False
        with contextlib.suppress(OSError):
            self._job.disk.rename(path, place)
            self._job.disk.sync_directory(self._job.root)
        return True


def step_in_trash(name: str) -> tuple[str, int] | None:
    """Return directory and step of what lies in a trash under a name, None where it is not a step."""
    directory, _, number = name.rpartition(".")[0].rpartition(".")
    return (directory, int(number)) if directory and number.isdecimal() else None
