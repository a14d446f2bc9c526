"""What the parts need, and what the job's directory holds, looked at every few seconds."""

import contextlib
import glob
import os
from collections import defaultdict
from collections.abc import Mapping

PAGE = os.sysconf("SC_PAGE_SIZE")

# By how much the second half of a run may grow, of what a process needs: pages of memory come and go.
ALLOWED = {"rss": 1 << 20, "fds": 0.5, "threads": 0.5}
KEPT = {"state_files": 2.0, "version_bytes": 64.0}


def of_process(pid: int) -> dict[str, float] | None:
    """Return bytes of memory, descriptors and threads of a process, None of one that has gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        fds, threads = (len(os.listdir(f"/proc/{pid}/{place}")) for place in ("fd", "task"))
    except (OSError, IndexError):
        return None
    return {"rss": pages * PAGE, "fds": fds, "threads": threads}


def of_job(job: str) -> dict[str, float]:
    """Return how much the daemon keeps in a job."""
    state = f"{job}/.syncd"
    kept = [name for place, _, names in os.walk(state) if "/trash" not in place for name in names]
    journals = [f"{state}/{name}" for name in kept if name.startswith("events.jsonl")]
    return {
        "events_bytes": sum(map(_size, journals)),
        "events_longest": max(map(_size, journals), default=0),
        "state_files": sum(not name.startswith(".") for name in kept),
        "version_bytes": _size(f"{state}/version.json"),
        "trash_steps": len(glob.glob(f"{state}/trash/*/*/*")),
        "steps": sum(name.startswith("global_step_") for name in os.listdir(job)),
    }


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class Samples:
    """Series by what was looked at. That of a process begins anew with the process."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self.highest: dict[tuple[str, str], float] = defaultdict(float)
        self._pids: dict[str, int] = {}

    def take(self, at: float, job: str, processes: Mapping[str, int | None]) -> None:
        """Look once.

        Args:
            at: Seconds after the beginning.
            job: The job directory.
            processes: Pid by the part's name.
        """
        with contextlib.suppress(OSError):
            self._add(at, "job", of_job(job))
        for name, pid in processes.items():
            found = of_process(pid) if pid is not None else None
            if pid is None or found is None:
                continue
            if self._pids.get(name) != pid:
                for what in found:
                    self.series.pop((name, what), None)
                self._pids[name] = pid
            self._add(at, name, found)

    def _add(self, at: float, name: str, found: Mapping[str, float]) -> None:
        for what, value in found.items():
            self.series[name, what].append((at, value))
            self.highest[name, what] = max(self.highest[name, what], value)
