"""A fleet of real processes: followers, each with an engine that says when it pauses, and daemons, to be killed."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.vllm import VllmHook
from support.fake_hook import FakeEngine, FakeHook, logprobs_of
from support.jobs import write_step
from syncd.config import load
from syncd.daemon.service import Daemon
from syncd.observe.events import Observers
from syncd.observe.journal import Journal
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import read_presences
from syncd.protocol.probe import Probe
from syncd.protocol.rolling import read_wave

NAMES = [f"e{number}" for number in range(6)]
TABLE = {"max_paused": 2, "canaries": 1, "patience": 60.0}
LOAD = 0.3
TOKENS = ((5, 6, 7), (8, 9))
PRELOADED = ("support.rolling_fleet",)


def write_line(log, name, what, label=None):
    """Write down what an engine does."""
    line = json.dumps({"engine": name, "what": what, "label": label, "at": time.monotonic()})
    with open(log, "a", encoding="utf-8") as file:  # one write, which appends as a whole
        file.write(f"{line}\n")


class LoggedEngine(FakeEngine):
    """An engine that takes a while to load, and writes down when it pauses and serves again."""

    def __init__(self, name, log, seconds):
        super().__init__()
        self.name, self._log, self.seconds = name, log, seconds
        self.serving, self.wanted = False, None

    def note(self, what, label=None):
        write_line(self._log, self.name, what, label)

    def load(self, path):
        self.note("pause" if self.serving else "start", self.wanted)
        time.sleep(self.seconds)
        super().load(path)

    def commit(self, label):
        super().commit(label)
        self.serving = True
        self.note("serve", label)

    def abort(self, path, label):
        super().abort(path, label)
        self.note("back", label)


class LoggedHook(FakeHook):
    """Tells the engine which version it loads."""

    def load(self, target):
        self.engine.wanted = target.label
        super().load(target)


class LoggedVllmHook(VllmHook):
    """Drives a real vLLM, and writes down when it pauses and serves again."""

    note = staticmethod(lambda what, label=None: None)

    def load(self, target):
        self.note("pause", target.label)
        super().load(target)

    def commit(self, target):
        super().commit(target)
        self.note("serve", target.label)

    def abort(self, target):
        super().abort(target)
        self.note("back", target and target.label)


def follow_vllm(job, name, log, address):
    """Be the follower of a real vLLM, which may end once while it loads a version."""
    hook = LoggedVllmHook.from_options(HookOptions(address))
    hook.note = partial(write_line, log, name)
    options = FollowOptions(poll=0.1, backoff=0.5, retries=1, check_every=5.0, stay=True, exam="off")
    with Follower.open(job, hook, name, options) as follower:
        hook.note("here")
        follower.run(stop=lambda: False)


def follow(job, name, log, seconds, stage, probes="held"):
    """Be a follower and its engine."""
    hook = LoggedHook(LoggedEngine(name, log, seconds), probes=probes)
    options = FollowOptions(
        poll=0.05, backoff=0.05, retries=0, check_every=1.0, stay=True, stage=stage, exam="off"
    )
    with Follower.open(job, hook, name, options) as follower:
        hook.engine.note("here")
        follower.run(stop=lambda: False)


def lead(job, table):
    """Be a daemon; without a table one that rolls nothing out."""
    opened = Job.at(job)
    config = load(None, {"rolling": table, "takeover": 4.0, "ttl": 10.0, "trash_grace": 2.0})
    with Observers(Journal(opened.events, 1 << 20, adopt=opened.disk.adopt)) as observers:
        daemon = Daemon(opened, config, SystemClock(), observers)
        while True:
            daemon.tick(woken=True)
            time.sleep(0.1)


def process(target, *arguments):
    """Start a process that is forked from one that has imported all of this."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    made = context.Process(target=target, args=arguments, daemon=True)
    made.start()
    return made


def read_log(path):
    """Return the lines of the engines, oldest first."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file.read().splitlines()]


class FleetOfProcesses:
    """The job, its processes, and what the engines have said."""

    limit = 240.0
    """Seconds in which a version reaches all engines, or a command ends."""

    def __init__(self, root):
        self.root, self.log, self.stage = str(root / "job"), str(root / "log"), str(root / "stage")
        (root / "job").mkdir(exist_ok=True)
        (root / "stage").mkdir(mode=0o700)
        self.job, self.killed, self.step = Job.at(self.root), [], 0
        self.daemon = process(lead, self.root, TABLE)
        self.followers = {name: self.follower(name) for name in NAMES}

    def follower(self, name):
        return process(follow, self.root, name, self.log, LOAD, self.stage)

    def publish(self, *, garbled=False):
        """Write a step; a garbled one has other tensors than those that its probe was made with."""
        self.step += 1
        meant = (lambda content: content[:-4] + b"\0\0\0\0") if garbled else (lambda content: content)
        answer = lambda content: logprobs_of(hashlib.sha256(meant(content)).hexdigest(), TOKENS)  # noqa: E731
        write_step(
            self.job, self.step, probe=lambda content: Probe(TOKENS, answer(content), "float32", "float32")
        )
        return self.step

    def running(self):
        presences = read_presences(self.job.disk, self.job.explorers)[0]
        return {name: presences[name].applied for name in NAMES if name in presences}

    def reaches(self, pair, names=NAMES):
        self.until(lambda: {self.running().get(name) for name in names} == {pair}, f"{names} run {pair}")

    def until(self, holds, what):
        ends = time.monotonic() + self.limit
        while not holds():
            assert time.monotonic() < ends, (
                f"{what}: {self.running()}, {read_wave(self.job)}, {read_log(self.log)[-12:]}"
            )
            time.sleep(0.05)

    def kill(self, name):
        """End a follower and its engine at once, and start another."""
        self.followers[name].kill()
        self.followers[name].join()
        self.killed.append((name, time.monotonic()))
        self.followers[name] = self.follower(name)

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.join()

    def most_paused(self):
        """Return how many engines that had served were paused at once."""
        lines = [(line["at"], line["engine"], line["what"]) for line in read_log(self.log)]
        lines += [(at, name, "killed") for name, at in self.killed]
        paused, most = set(), 0
        for _, name, what in sorted(lines):
            paused = paused | {name} if what == "pause" else paused - {name}
            most = max(most, len(paused))
        return most

    def loaders(self, step, generation=None):
        """Return the engines that have begun to load a step, in any generation unless one is given."""
        loads = [line for line in read_log(self.log) if line["what"] in ("pause", "start")]
        labels = [(line["engine"], *line["label"].split(".")[:2]) for line in loads]
        wanted = str(step), generation and str(generation)
        return {engine for engine, of, number in labels if number == wanted[0] and wanted[1] in (None, of)}

    def syncd(self, *arguments):
        command = [sys.executable, "-P", "-m", "syncd", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=self.limit, check=False)

    def close(self):
        for made in (self.daemon, *self.followers.values()):
            made.kill()
            made.join()
