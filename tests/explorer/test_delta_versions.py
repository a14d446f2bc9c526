"""Versions by deltas and keyframes while everything else happens: each is read as what a full save would have been.

Real processes: a daemon that is killed and replaced, and readers of three hosts, each with a stage of its own, that
are killed at any moment and come back. The trainer writes deltas and keyframes with shortcuts as two ranks do, deltas
and whole steps as one, goes back to earlier steps and writes their successors again; a person rolls back.
SYNCD_DELTA_VERSIONS is the number of versions, SYNCD_SEED the schedule.
"""

import contextlib
import copy
import os
import shutil
import subprocess
import sys
import time
from random import Random

import pytest
from support.deltas import SmallModel, contents_digest, write_delta, write_keyframe
from support.jobs import steps_of
from support.paths import PYTHONPATH, TESTS

from syncd.client.client import Client
from syncd.errors import TryAgainError
from syncd.protocol.layout import Job
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import read_version_or_none
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.materialise import materialise, prove
from syncd.transports.delta.publish import publish_delta

VERSIONS = int(os.environ.get("SYNCD_DELTA_VERSIONS", "50"))
SEED = int(os.environ.get("SYNCD_SEED", "1"))
READERS = ("h1", "h2", "h3")
PATIENCE = 240.0
WAYS = ("delta",) * 10 + ("ranks",) * 5 + ("keyframe",) * 3 + ("whole",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 6 * VERSIONS))]


class World:
    """A job with its processes, and what every sealed step must read as."""

    def __init__(self, place):
        self.place, self.job = place, Job.at(str(place / "job"))
        os.mkdir(self.job.root)
        with open(f"{self.job.root}/config.toml", "w", encoding="ascii") as file:
            file.write("[daemon]\nkeep_last = 3\ntrash_grace = 0.0\nrewind_settle = 0.0\n")
        self.random, self.model = Random(SEED), SmallModel(SEED)
        self.models, self.made, self.kinds = {}, {}, []
        self.parent, self.next = 0, 1
        self.processes = {}
        self.client = Client.open(
            self.job.root, "trainer", "t", poll=0.005, heartbeat=False, timeout=PATIENCE
        )

    def run(self, name):
        """Start a process: the daemon, or a reader with the stage of its host."""
        place = f"{self.place}/{name}"
        reader = [f"{TESTS}/programs/delta_reader.py", self.job.root, place, name, self.log(name)]
        daemon = ["-m", "syncd", "watch", self.job.root]
        with open(f"{self.place}/{name}.err", "a", encoding="utf-8") as errors:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *(daemon if name == "daemon" else reader)],
                env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdout=errors, stderr=errors,
            )  # fmt: skip

    def log(self, name):
        return f"{self.place}/{name}.log"

    def kill(self, name):
        process = self.processes.pop(name)
        assert process.poll() is None, f"{name} ended with {process.returncode}: {self.errors(name)}"
        process.kill()
        process.wait()

    def said(self, name):
        with open(f"{self.place}/{name}.err", encoding="utf-8") as file:
            return file.read()

    def errors(self, name):
        return self.said(name)[-4000:]

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.client.close()

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
            subprocess.run(
                [sys.executable, "-m", "syncd", "rollback", self.job.root, str(older[-1]), "--reason", "worse"],
                env=os.environ | {"PYTHONPATH": PYTHONPATH}, check=True, capture_output=True,
            )  # fmt: skip

    def wait(self, holds):
        """Wait until the published version is as it must be."""
        ends = time.monotonic() + PATIENCE
        while (version := read_version_or_none(self.job)) is None or not holds(version):
            assert time.monotonic() < ends, f"{version}: {self.errors('daemon')}"
            assert self.processes["daemon"].poll() is None, self.errors("daemon")
            time.sleep(0.01)

    # --- what was read --------------------------------------------------------------------------------------------

    def read(self, name):
        """Return the lines of a reader; one that was killed while it wrote may have left half of one."""
        if not os.path.exists(self.log(name)):
            return []
        with open(self.log(name), encoding="ascii") as file:
            return [line.split() for line in file if line.endswith("\n")]

    def wait_for_readers(self):
        """Wait until every host has read the published version, whatever was killed there before."""
        ends, newest = time.monotonic() + PATIENCE, read_version_or_none(self.job).digest
        for name in READERS:
            while not any(digest == newest for _, digest, _ in self.read(name)[-3:]):
                assert self.processes[name].poll() is None, self.errors(name)
                assert time.monotonic() < ends, (
                    f"{name} is stranded: {self.read(name)[-1:]}, {self.errors(name)}"
                )
                time.sleep(0.05)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def happen(world):
    """Let chance do something between two steps."""
    what, chance = world.random, world.random.random()
    if chance < 0.10:
        name = what.choice(READERS)
        world.kill(name)
        world.run(name)
    elif chance < 0.13:
        world.kill("daemon")
        world.run("daemon")
    elif chance < 0.17:
        world.rewind()
    elif chance < 0.19:
        world.roll_back()
    elif chance < 0.60:
        world.wait(lambda version: version.step == world.parent)


@pytest.mark.fault("a pruned chain is replayed on the wrong base")
@pytest.mark.fault("a delta is applied to a base that it was not made from")
@pytest.mark.fault("a patch that was applied half drifts until a restart")
def test_versions_by_deltas_are_bit_for_bit_those_of_full_saves_and_nobody_is_stranded(world, record_line):
    for name in ("daemon", *READERS):
        world.run(name)
    for _ in range(VERSIONS):
        world.train()
        happen(world)
    world.train()
    world.wait(lambda version: version.step == world.parent)
    world.wait_for_readers()
    loads = {name: world.read(name) for name in READERS}
    for name, lines in loads.items():
        wrong = [line for line in lines if world.made[line[1]] != line[2]]
        assert not wrong, f"{name}: {wrong[:3]}"
    for step in steps_of(world.job):
        with contextlib.suppress(TryAgainError):  # retention goes on
            assert prove(world.job, step) == []
            materialise(world.job, step, str(world.place / f"made{step}"))
            digest = read_manifest(world.job.disk, world.job.step(step)).digest
            assert contents_digest(world.place / f"made{step}") == world.made[digest]
    assert "step_damaged" not in world.said("daemon")
    assert {"delta", "shortcut", "weights"} <= set(world.kinds)
    counts = {kind: world.kinds.count(kind) for kind in sorted(set(world.kinds))}
    record_line(
        f"{len(world.kinds)} versions, seed {SEED}: {counts}; read {[len(lines) for lines in loads.values()]}"
    )
