"""What tests of whole jobs share: trainer, daemon and explorers as processes that are ended whatever happens."""

import contextlib
import json
import os
import subprocess
import time

from support import forked
from support.paths import PYTHONPATH
from support.ports import free_port
from support.served_process import EXPLORER

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
    "explorer": (*EXPLORER, "run", "job.toml"),
}
"""Both sides of the job that `job.toml` describes."""


@contextlib.contextmanager
def program(place, name, *argv, **more):
    """Run a program beside others."""
    made = forked.start(f"{place}/{name}.log", ENVIRONMENT | more, *argv)
    try:
        yield made
    finally:
        made.end()


def alone(log, *options, kind="torch", cwd=None):
    """Start a trainer that is its only rank, with the job file and options."""
    environment = {**ENVIRONMENT, **RANK, "MASTER_PORT": str(free_port())}
    return forked.start(log, environment, "-m", "trainer", "train", *options, kind=kind, cwd=cwd)


def run_ranks(place, count, *argv, kind="torch"):
    """Run a program as ranks that meet as torchrun's do, until all have ended or one has failed.

    Returns their exit codes, None for one that was ended, and what they said.
    """
    shared = {**ENVIRONMENT, **RANK, "WORLD_SIZE": str(count), "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as running:
        ranks = []
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            ranks.append(forked.start(f"{place}/rank{rank}.log", shared | own, *argv, kind=kind))
            running.callback(ranks[-1].end)
        deadline = time.monotonic() + 300
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            assert time.monotonic() < deadline, logs(place)
            time.sleep(0.05)
    return codes, [rank.said() for rank in ranks]


def ended(process, deadline):
    """Wait until a process has ended, bounded; return its exit code, None if it has not."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(deadline - time.monotonic(), 0.0))
    return process.returncode


def run_together(place, commands, seconds, kind=None):
    """Run programs of Python in `place` until all have ended well; the first that fails ends all, with what it said.

    Args:
        place: Their directory, and that of their logs.
        commands: The arguments of each, by name.
        seconds: How long they may take.
        kind: What the trainer is forked from (`support.forked`) if it is to be its only rank.
    """
    with contextlib.ExitStack() as opened:
        processes = {}
        for name, arguments in commands.items():
            log = f"{place}/{name}.log"
            if kind is not None and name == "trainer":
                processes[name] = alone(log, *arguments[3:], kind=kind, cwd=place)
            else:
                processes[name] = forked.start(log, {"PYTHONPATH": PYTHONPATH}, *arguments, cwd=place)
            opened.callback(processes[name].end)
        deadline = time.monotonic() + seconds
        while set((codes := {name: process.poll() for name, process in processes.items()}).values()) != {0}:
            assert not any(codes.values()), f"{codes}\n{logs(place)}"
            assert time.monotonic() < deadline, f"no end after {seconds} s: {codes}\n{logs(place)}"
            time.sleep(0.2)


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
