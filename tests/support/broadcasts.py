"""What tests of the broadcast share: a job, its daemon, a trainer and explorers as processes of their own."""

import importlib
import json
import os
import time

from support import forked
from support.paths import PYTHONPATH, TESTS

HERE = f"{TESTS}/parts/broadcast"
ENVIRONMENT = {
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
}
LONG = 120.0
SIZES = {"vocab": 8192, "width": 16}
"""Half a megabyte: five buckets, so that some are in the middle."""


class Processes:
    """Processes over one job, each ended at the end whatever happens."""

    def __init__(self, job):
        self.job, self.all = str(job), {}
        os.makedirs(self.job, exist_ok=True)
        with open(f"{self.job}/sizes.json", "w", encoding="ascii") as file:
            json.dump(SIZES, file)

    def start(self, name, *command):
        with open(f"{self.job}.{name}.log", "ab"):
            pass
        self.all[name] = forked.start(f"{self.job}.{name}.log", ENVIRONMENT, *command)
        return self.all[name]

    def daemon(self):
        return self.start(
            "daemon", "-m", "syncd", "watch", self.job, "--keep-last", "3", "--trash-grace", "0"
        )

    def trainer(self, style, steps, members, *options):
        return self.start("trainer", f"{HERE}/programs/send.py", self.job, style, steps, members, *options)

    def explorer(self, identity, style, last, *options):
        return self.start(identity, f"{HERE}/programs/receive.py", self.job, identity, style, last, *options)

    def ended(self, name, timeout=LONG):
        code = self.all[name].wait(timeout)
        assert code == 0, f"{name} ended with {code}: {self.log(name)}"

    def log(self, name):
        with open(f"{self.job}.{name}.log", encoding="utf-8", errors="replace") as file:
            return file.read()[-4000:]

    def result(self, name):
        with open(f"{self.job}.{name}.json", encoding="ascii") as file:
            return json.load(file)

    def until(self, condition, timeout=LONG):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "\n".join(self.log(name) for name in self.all)
            time.sleep(0.02)

    def shut(self):
        for process in self.all.values():
            process.end()


def left_over(job):
    """Return the documents of groups that are still there."""
    found = []
    for directory, _, names in os.walk(f"{job}/.syncd/rendezvous"):
        found += [f"{directory}/{name}" for name in names]
    return found


def write_experiences(job, steps):
    """Write what so many steps train on."""
    importlib.import_module("support.trainers").write_experiences(job, steps)  # it imports torch


def received(tensors, memory=None):
    """Return tensors as a receiver has them: all in one piece of shared memory, each at a multiple of 16.

    Args:
        tensors: The tensors by name.
        memory: What an earlier version was received into.
    """
    from explorer_hooks.parts.broadcast.received import allocate

    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]
    if memory is None:
        memory = allocate(sum(sizes))
    return {
        name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (name, tensor), part in zip(tensors.items(), memory.split(sizes), strict=True)
    }
