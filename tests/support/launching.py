"""What the tests of launch share: how a program of ranks is run, and what each rank has found."""

import json
import os
import signal
import subprocess
import sys
import time

from support.paths import PYTHONPATH, TESTS

PROGRAMS = f"{TESTS}/trainer/programs"
PROGRAM = f"{PROGRAMS}/launch_rank.py"
OWN = {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{PROGRAMS}"}
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLIBC_TUNABLES")


class Launch:
    """One launch of a program of ranks below a directory.

    Args:
        place: Where the job and what ranks say is.
        before: What starts the program: torchrun, srun, or nothing.
    """

    def __init__(self, place, *options, before=(sys.executable,), **popen):
        self.said, self.place = place / "said", place
        self.said.mkdir(exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        self.process = subprocess.Popen(
            [*before, PROGRAM, f"{place}/job", *options],
            env=environ | OWN | {"SAY": str(self.said)},
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen),
        )

    def ended(self, timeout=120):
        """Return exit code, stdout and stderr."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        return self.process.returncode, output, errors

    def ranks(self):
        """Return what the ranks have said so far."""
        names = sorted(name for name in os.listdir(self.said) if name.endswith(".json"))
        return [json.loads((self.said / name).read_text()) for name in names]

    def up(self, count):
        """Wait until so many ranks have said something and return it."""
        until(lambda: len(self.ranks()) == count, self.process)
        return self.ranks()

    def send(self, number):
        self.process.send_signal(number)


def until(holds, process=None, seconds=60):
    ends = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


TERM, KILL, INT, USR2 = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR2
