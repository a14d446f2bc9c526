"""Where benchmarks/readers.py runs: hosts with limited links around a stand-in for a file server."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from links import Links

from syncd.protocol.layout import Job

ROOT = Path(__file__).parents[1]
_ORIGIN = ROOT / "tests" / "parts" / "hosts" / "programs" / "bed_origin.py"


class LinksBed:
    """Namespaces of this machine. The step's files come by a mount of FUSE through the origin's link.

    Args:
        readers: How many.
        rate: Of the origin's link, in MB/s; each reader's is twice that, each way.
        job: What is read.
        place: For files of the bed.
    """

    def __init__(self, readers: int, rate: float, job: Job, place: Path) -> None:
        self._links = Links(readers, rate, 2 * rate, 2 * rate)
        self._job, self._ready, self._place = job, place / "origin.ready", place

    def __enter__(self) -> Self:
        self._links.__enter__()
        command = [sys.executable, str(_ORIGIN), self._job.root, "8000", str(self._ready)]
        self._origin = self.popen("o", command, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._origin.kill()
        self._origin.wait()
        self._links.__exit__()

    def popen(self, name: str, command: list[str], **more: Any) -> "subprocess.Popen[str]":
        """Start a program at the origin, `o`, or at a reader, `h0` to `hN`."""
        process: subprocess.Popen[str] = self._links.popen(name, command, **more)
        return process

    def ip(self, name: str) -> str:
        """Return the address of an end."""
        return str(self._links.ip(name))

    def sent(self) -> int:
        """Return the bytes that the origin has sent."""
        return int(self._links.sent("o"))

    def settings(self, name: str) -> dict[str, Any]:
        """Return how a reader finds the job."""
        return {"name": name, "ip": self.ip(name), "job": self._job.root, "origin": f"{self.ip('o')}:8000"}
