"""The demo's processes: each with its own log, none left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.launch.die_with_parent import dying_with_parent

ROOT = Path(__file__).resolve().parents[2]
_ENDING = 30.0

Process = subprocess.Popen[bytes]


class FailedError(Exception):
    """A process of the demo ended with an error, or timed out."""


class Processes:
    """Starts processes; leaving the `with` block ends them all, the last one first.

    Args:
        logs: Where each one's output goes, as `<name>.log`.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.running.values()):
            end(process)

    def start(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a command that gets SIGTERM if the demo itself is killed."""
        print(f"$ {shown(command)}", flush=True)
        # One thread a process: there are more processes than cores.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                dying_with_parent(signal.SIGTERM, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the demo's own; it ends the others in their order
            )
        return self.running[name]

    def check(self) -> None:
        """Raise if one of them has failed.

        Raises:
            FailedError: With the end of its log.
        """
        for name, process in self.running.items():
            if process.poll():
                raise FailedError(f"{name} ended with {process.returncode}\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """Return the end of a log."""
        path = self.logs / f"{name}.log"
        return f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])

    def wait(self, name: str, seconds: float, progress: Path | None = None) -> None:
        """Wait until one process has succeeded and all others run or have succeeded.

        Args:
            name: The process.
            seconds: Without progress, at most.
            progress: A file that grows as the work advances; without one, only the end is progress.

        Raises:
            FailedError: One has failed, or nothing has advanced for so long.
        """
        self.until(lambda: self.running[name].poll() is not None, seconds, f"{name} to end", progress)

    def until(
        self, there: Callable[[], bool], seconds: float, what: str, progress: Path | None = None
    ) -> None:
        """Wait for a condition while no process has failed; arguments as of `wait`.

        Raises:
            FailedError: One has failed, or nothing has advanced for so long.
        """
        size, limit = _size(progress), time.monotonic() + seconds
        while not there():
            self.check()
            if _size(progress) != size:
                size, limit = _size(progress), time.monotonic() + seconds
            if time.monotonic() > limit:
                raise FailedError(f"no progress for {seconds:.0f} s, waiting for {what}; logs: {self.logs}")
            time.sleep(0.1)
        self.check()


def _size(path: Path | None) -> int:
    """Return the size of a file in bytes, 0 while there is none."""
    return path.stat().st_size if path and path.exists() else 0


def end(process: Process) -> None:
    """End a process: first by SIGTERM, on which every part of syncd finishes its current work."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown(command: list[str]) -> str:
    """Return a command as a user would type it here."""
    program, first, *rest = command
    own = program == sys.executable
    words = rest[1:] if own and first == "-P" else ["python", first, *rest]
    line = " ".join(words).replace(f"{ROOT}/", "")
    return line.replace("explorer_hooks ", "explorer ", 1) if own else line
