"""What the tests of the follower share: a job with a daemon, an engine, and followers between them."""

import contextlib
import os

from explorer_hooks.follower.follower import Follower, FollowOptions
from support.fake_hook import FakeEngine, FakeHook
from support.jobs import start, write_step
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import path_of, read_presence
from syncd.protocol.version import engine_label

QUICK = {"poll": 0.005, "backoff": 0.01, "check_every": 0.01}


class Scene:
    """A job, a real daemon that ticks when told, an engine, and followers of it."""

    def __init__(self, root, **config):
        os.mkdir(root)
        self.root = str(root)
        self.job = Job.at(root)
        self.daemon, self.heard, _ = start(
            self.job, SystemClock(), rewind_settle=0.0, trash_grace=0.0, **config
        )
        self.engine = FakeEngine()
        self.hook = FakeHook(self.engine)
        self.told = []
        self._stack = contextlib.ExitStack()

    def follow(self, identity="e0", hook=None, **options):
        tell = lambda level, name, fields: self.told.append((name, fields))  # noqa: E731
        chosen = FollowOptions(**{**QUICK, **options})
        made = Follower.open(self.root, hook or self.hook, identity, chosen, listener=tell)
        return self._stack.enter_context(made)

    def publish(self, step, **options):
        manifest = write_step(self.job, step, **options)
        self.tick()
        return manifest

    def label(self, step, generation=1):
        """Return what engines are told of the version of a step."""
        return engine_label((generation, step), read_manifest(self.job.disk, self.job.step(step)).digest)

    def tick(self):
        self.daemon.tick(woken=True)

    def presence(self, identity="e0"):
        return read_presence(self.job.disk, path_of(self.job.explorers, identity))

    def names(self):
        return [name for name, _ in self.told]

    def payload(self, step):
        return f"{self.job.step(step)}/actor"

    def close(self):
        self._stack.close()
        self.daemon.close()
