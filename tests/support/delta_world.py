"""A job of deltas and keyframes with two daemons and readers of three hosts, whose trainer is the test itself."""

import contextlib
import copy
import fcntl
import glob
import json
import mmap
import os
import shutil
import signal
import sys
import time
from random import Random

from support import forked
from support.deltas import SmallModel, contents_digest, write_delta, write_keyframe
from support.jobs import steps_of
from support.paths import PYTHONPATH, TESTS
from syncd.client.client import Client
from syncd.errors import TryAgainError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.leadership import latest_token, read_leader
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import read_version_or_none
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.publish import publish_delta

HOSTS = {"h1": "h1", "h2": "h2", "h3a": "h3", "h3b": "h3"}
"""The host of each reader: those of one host share its stage."""

READERS, DAEMONS = tuple(HOSTS), ("daemon1", "daemon2")
PATIENCE = 240.0
WAYS = ("delta",) * 10 + ("ranks",) * 5 + ("keyframe",) * 3 + ("whole",)


def flip(path):
    """Change a byte through a mapping, which leaves the times of a file on a tmpfs as they are."""
    before = os.stat(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[before.st_mtime_ns % len(view)] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path):
    os.truncate(path, (os.path.getsize(path) + 1) // 2)  # a byte is left to be flipped


def add(path):
    shutil.copy(path, f"{path}.safetensors")


class World:
    """A job with its processes, and what every sealed step must read as.

    Args:
        place: The directory of everything.
        seed: Of the schedule and of the weights.
    """

    def __init__(self, place, seed):
        self.place, self.job = place, Job.at(str(place / "job"))
        os.mkdir(self.job.root)
        with open(f"{self.job.root}/config.toml", "w", encoding="ascii") as file:
            file.write("[daemon]\nkeep_last = 3\ntrash_grace = 0.0\nrewind_settle = 0.0\n")
        self.random, self.model = Random(seed), SmallModel(seed)
        self.models, self.made, self.kinds = {}, {}, []
        self.parent, self.next = 0, 1
        self.processes, self.fallen, self.kills = {}, "", 0
        self.late, self.joins = {}, []
        self.stopped, self.stops, self.changed = {}, 0, 0
        self.client = Client.open(
            self.job.root, "trainer", "t", poll=0.005, heartbeat=False, timeout=PATIENCE
        )

    def run(self, name):
        """Start a process: a daemon, or a reader with the stage of its host."""
        reader = [f"{TESTS}/programs/delta_reader.py", self.job.root, self.stage(name), name, self.log(name)]
        argv = ["-m", "syncd", "watch", self.job.root] if name in DAEMONS else reader
        environment = {"PYTHONPATH": PYTHONPATH}
        self.processes[name] = forked.start(f"{self.place}/{name}.err", environment, *argv)

    def stage(self, name):
        return f"{self.place}/{HOSTS.get(name)}"

    def log(self, name):
        return f"{self.place}/{name}.log"

    def kill(self, name):
        process = self.processes.pop(name)
        assert process.poll() is None, f"{name} ended with {process.returncode}: {self.errors(name)}"
        process.kill()
        process.wait()
        self.stopped.pop(name, None)

    def stop(self, name, seconds):
        """Stop a process as a debugger or a full host does; it goes on after so many seconds."""
        if name in self.processes and name not in self.stopped:
            self.processes[name].send_signal(signal.SIGSTOP)
            self.stopped[name], self.stops = time.monotonic() + seconds, self.stops + 1

    def wake(self, *, everybody=False):
        """Let stopped processes go on whose time has come."""
        for name in [name for name, ends in self.stopped.items() if everybody or time.monotonic() >= ends]:
            self.processes[name].send_signal(signal.SIGCONT)
            del self.stopped[name]

    def said(self, *names):
        """Return the lines that processes have logged."""
        found = []
        for name in names:
            with open(f"{self.place}/{name}.err", encoding="utf-8") as file:
                found += file.read().splitlines()
        return found

    def errors(self, *names):
        return "\n".join(self.said(*names))[-4000:]

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.client.close()

    # --- the daemons --------------------------------------------------------------------------------------------

    def leader(self):
        """Return which daemon leads, None while nobody who lives does."""
        with contextlib.suppress(*MISSING):
            pid = read_leader(self.job, latest_token(self.job)).process.pid
            return next(
                (name for name in DAEMONS if name in self.processes and self.processes[name].pid == pid), None
            )
        return None

    def fail_over(self):
        """Kill the daemon that leads; while the other one has not replaced it yet, nobody is killed."""
        self.fallen = self.leader() if not self.fallen else self.fallen
        if self.fallen in self.processes:
            self.kill(self.fallen)
            self.kills += 1

    def mend(self):
        """Start the killed daemon as the stand-by once the other one leads."""
        if self.fallen and self.leader():
            self.run(self.fallen)
            self.fallen = ""

    def terms(self):
        """Return the terms in which the daemons have led."""
        acquired = [json.loads(line) for line in self.said(*DAEMONS) if '"leadership_acquired"' in line]
        return {event["term"] for event in acquired}

    # --- the trainer --------------------------------------------------------------------------------------------

    def train(self):
        """Store one more step, the way that chance says; whole where the step before was removed meanwhile."""
        step, way = self.next, self.random.choice(WAYS)
        self.model.train(self.random.choice((0, 0.001, 0.02, 0.2)))
        export = self.model.export(self.place / f"export{len(self.kinds)}")
        self._store(way if self.parent in steps_of(self.job) else "whole", step, export)
        manifest = read_manifest(self.job.disk, self.job.step(step))
        self.made[manifest.digest] = contents_digest(export)
        shutil.rmtree(export)
        self.models[step] = copy.deepcopy(self.model)
        self.models = dict(sorted(self.models.items())[-20:])
        self.kinds.append("shortcut" if manifest.shortcut else manifest.kind)
        self.parent, self.next = step, step + 1

    def _store(self, way, step, export):
        disk = FollowingDisk()
        found = read_export(disk, export)
        with contextlib.suppress(TryAgainError):
            if way == "delta":
                return publish_delta(self.job, step, disk, found, self.parent).manifest
            if way in ("ranks", "keyframe") and self._has_room():
                write = write_delta if way == "ranks" else write_keyframe
                return write(self.job, step, export, self.parent)
        return publish_export(self.job, step, disk, found)

    def _has_room(self):
        return len(read_chain(self.job, self.parent)) < 16

    def rewind(self):
        """Go back to an earlier step, and have the daemon remove the one after it, which is written again."""
        there = [step for step in steps_of(self.job) if step in self.models and step < self.parent]
        if not there:
            return
        back = self.random.choice(there)
        self.client.publish(None, back, rewind=True)
        self.wait(lambda version: version.step == back)
        self.model, self.parent = copy.deepcopy(self.models[back]), back
        for step in [step for step in steps_of(self.job) if step > back]:
            try:
                self.client.vacate(step)
            except TryAgainError:  # somebody reads it: the number is taken
                self.next = step + 1
                continue
            self.next = min(self.next, step)
        self.next = max(self.next, back + 1, *(step + 1 for step in steps_of(self.job)))

    def roll_back(self):
        """A person publishes an earlier step; the trainer goes on from its own."""
        older = [step for step in steps_of(self.job) if step < self.parent]
        if older:
            command = [sys.executable, "-m", "syncd", "rollback", self.job.root, str(older[-1])]
            done = forked.run_forked([*command, "--reason", "worse"])
            was_pruned = done.returncode in (2, 75) and older[-1] not in steps_of(self.job)
            assert done.returncode == 0 or was_pruned, done.stderr

    def wait(self, holds):
        """Wait until the published version is as it must be."""
        ends = time.monotonic() + PATIENCE
        self.wake()
        while (version := read_version_or_none(self.job)) is None or not holds(version):
            assert time.monotonic() < ends, f"{version}: {self.errors(*DAEMONS)}"
            for name in DAEMONS:
                assert name == self.fallen or self.processes[name].poll() is None, self.errors(name)
            time.sleep(0.01)
            self.wake()

    # --- the readers ----------------------------------------------------------------------------------------------

    def restart(self, name, *, late=False, changed=False):
        """Kill a reader and start it again; a late one has lost its stage, as on another host.

        Args:
            name: The reader.
            late: Whether it comes to a host without a stage.
            changed: Whether somebody changes a copy meanwhile.
        """
        self.kill(name)
        self.note_join(name)
        if changed:
            self.change_a_copy(HOSTS[name])
        if late:
            shutil.rmtree(self.stage(name), ignore_errors=True)
            self.late[name] = len(self.read(name))
        self.run(name)

    def change_a_copy(self, host):
        """Change a staged copy of a host, unless somebody takes one just now, in a way that chance says."""
        with open(f"{self.place}/{host}.taking", "w", encoding="ascii") as lock, contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = sorted(glob.glob(f"{self.place}/{host}/*/[0-9]*-*/*.*"))
            if files:
                self.random.choice((flip, flip, flip, os.unlink, cut, add))(self.random.choice(files))
                self.changed += 1

    def note_join(self, name):
        """Record of which kind the first version was that a late reader has read, if it has read one."""
        before = self.late.pop(name, None)
        if before is not None and len(lines := self.read(name)) > before:
            self.joins.append(lines[before][3])

    # --- what was read --------------------------------------------------------------------------------------------

    def read(self, name):
        """Return the lines of a reader; one that was killed while it wrote may have left half of one."""
        if not os.path.exists(self.log(name)):
            return []
        with open(self.log(name), encoding="ascii") as file:
            lines = [line.split() for line in file if line.endswith("\n")]
        return [line for line in lines if len(line) == 4]

    def wait_for_readers(self, *names, after=0):
        """Wait until hosts have read the published version, whatever was killed there before."""
        ends, newest = time.monotonic() + PATIENCE, read_version_or_none(self.job).digest
        for name in names:
            while not any(digest == newest for _, digest, _, _ in self.read(name)[after:][-3:]):
                assert self.processes[name].poll() is None, self.errors(name)
                assert time.monotonic() < ends, (
                    f"{name} is stranded: {self.read(name)[-1:]}, {self.errors(name)}"
                )
                time.sleep(0.05)
