"""A fleet of real processes: followers, each with an engine that says when it pauses, and daemons, to be killed."""

import json
import multiprocessing
import os
import time

from explorer_hooks.follower.follower import Follower, FollowOptions
from support.fake_hook import FakeEngine, FakeHook
from syncd.config import load
from syncd.daemon.service import Daemon
from syncd.observe.events import Observers
from syncd.observe.journal import Journal
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock

PRELOADED = ("support.rolling_fleet",)


class LoggedEngine(FakeEngine):
    """An engine that takes a while to load, and writes down when it pauses and serves again."""

    def __init__(self, name, log, seconds):
        super().__init__()
        self.name, self._log, self.seconds = name, log, seconds
        self.serving, self.wanted = False, None

    def note(self, what, label=None):
        line = json.dumps({"engine": self.name, "what": what, "label": label, "at": time.monotonic()})
        with open(self._log, "a", encoding="utf-8") as file:  # one write, which appends as a whole
            file.write(f"{line}\n")

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


def follow(job, name, log, seconds, stage):
    """Be a follower and its engine."""
    hook = LoggedHook(LoggedEngine(name, log, seconds), probes="held")
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
