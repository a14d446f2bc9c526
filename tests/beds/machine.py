"""A machine that a real systemd has booted (`systemd-bed`), and what tests ask of it."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

BEDS = os.path.dirname(os.path.abspath(__file__))
_LIMIT = 60.0


class Machine:
    """One booted machine.

    Args:
        init: Its first process, as this host numbers it.
    """

    def __init__(self, init: int) -> None:
        self.init = init

    def path(self, inside: str) -> str:
        """Return where a file of the machine is for this host."""
        return f"/proc/{self.init}/root{inside}"

    def try_(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine."""
        entered = ["nsenter", "-t", str(self.init), "-a", "--", *command]
        return subprocess.run(entered, capture_output=True, text=True, check=False, timeout=_LIMIT)

    def run(self, *command: str) -> str:
        """Run a command on the machine that has to end with 0, and return what it says."""
        done = self.try_(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr, self.journal())
        return done.stdout

    def write(self, inside: str, text: str) -> None:
        """Write a file of the machine."""
        os.makedirs(os.path.dirname(self.path(inside)), exist_ok=True)
        with open(self.path(inside), "w", encoding="utf-8") as file:
            file.write(text)

    def show(self, unit: str, *names: str) -> Mapping[str, str]:
        """Return properties of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"-p{name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def get(self, unit: str, name: str) -> str:
        """Return one property of a unit."""
        return self.show(unit, name)[name]

    def journal(self, unit: str | None = None) -> str:
        """Return the last lines of the journal."""
        which = ["-u", unit] if unit else []
        return self.try_("journalctl", "--no-pager", "-o", "cat", "-n", "60", *which).stdout

    def until(self, holds: Callable[[], bool], unit: str | None = None) -> None:
        """Wait until something holds; what the journal says is told if it never does."""
        ends = time.monotonic() + _LIMIT
        while not holds():
            assert time.monotonic() < ends, self.journal(unit)
            time.sleep(0.02)


@contextlib.contextmanager
def booted(*shown: tuple[str, str], setup: str = "") -> Iterator[Machine]:
    """Boot a machine for a while.

    Args:
        *shown: Directories of this host, each with the place where the machine sees it.
        setup: A script that runs in the machine's root before it boots.
    """
    reader, writer = os.pipe()
    os.write(writer, setup.encode())
    os.close(writer)
    pairs = [word for there, here in shown for word in ("-b", f"{there}:{here}")]
    command = [f"{BEDS}/systemd-bed", *pairs, f"/dev/fd/{reader}"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[reader],
    ) as process:
        os.close(reader)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise OSError(process.communicate()[1])
        try:
            yield Machine(int(line))
        finally:
            process.communicate(timeout=_LIMIT)
