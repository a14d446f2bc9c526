"""What tests of whole jobs share: trainer, daemon and explorers as processes that are ended whatever happens."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

from support import forked
from support.paths import PYTHONPATH

ENVIRONMENT = {
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
}
"""In which the tiny engine counts as installed."""

RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
"""How torchrun tells its only rank, so that `trainer train` is that rank and starts no process of its own."""


TRAIN_AND_EXPLORE = {
    "trainer": ("-m", "trainer", "train", "job.toml"),
    "explorer": ("-c", "from explorer_hooks.cli.main import main; main()", "run", "job.toml"),
}
"""Both sides of the job that `job.toml` describes."""


@contextlib.contextmanager
def program(place, name, *argv, **more):
    """Run a program beside others."""
    made = forked.start(f"{place}/{name}.log", ENVIRONMENT | more, *argv)
    try:
        yield made
    finally:
        made.kill()
        made.join(30)


def ended(process, deadline):
    """Wait until a process has ended, bounded; return its exit code, None if it has not."""
    process.join(max(deadline - time.monotonic(), 0.0))
    return process.exitcode


def run_together(place, commands, seconds):
    """Run programs of Python in `place` until all have ended well; the first that fails ends all, with what it said.

    Args:
        place: Their directory, and that of their logs.
        commands: The arguments of each, by name.
        seconds: How long they may take.
    """
    with contextlib.ExitStack() as opened:
        processes = {}
        for name, arguments in commands.items():
            log = opened.enter_context(open(f"{place}/{name}.log", "wb"))
            processes[name] = subprocess.Popen(
                [sys.executable, *arguments], cwd=place, env=os.environ | {"PYTHONPATH": PYTHONPATH},
                stdout=log, stderr=log,
            )  # fmt: skip
            opened.callback(processes[name].wait)
            opened.callback(processes[name].kill)
        deadline = time.monotonic() + seconds
        while set((codes := {name: process.poll() for name, process in processes.items()}).values()) != {0}:
            assert not any(codes.values()), f"{codes}\n{logs(place)}"
            assert time.monotonic() < deadline, f"no end after {seconds} s: {codes}\n{logs(place)}"
            time.sleep(0.2)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def logs(place):
    names = sorted(name for name in os.listdir(place) if name.endswith(".log"))
    ends = []
    for name in names:
        with open(f"{place}/{name}", encoding="utf-8", errors="replace") as file:
            ends.append(f"--- {name}\n{file.read()[-1500:]}")
    return "\n".join(ends)


def journal_lines(place, name):
    """Return what an engine of the tests wrote of itself."""
    with open(f"{place}/{name}.journal", encoding="ascii") as file:
        return [json.loads(line) for line in file]
