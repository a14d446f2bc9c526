"""From site to site over moto's S3, with real processes: kills at random instants, an outage, experiences."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.cli import environment
from support.experiences import make
from support.jobs import shard_bytes, steps_of
from support.mirrors import Trainer, files_of
from support.s3 import SERVER, environment_of, refuse_keys, running_s3

from syncd.experience import batch_paths
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import read_presences
from syncd.protocol.probe import Probe, read_base_probe, write_base_probe
from syncd.protocol.version import read_version
from syncd.protocol.writer import StepWriter
from syncd.transports.delta.materialise import prove
from trainer.experience.store import ExperienceReader

pytestmark = [
    pytest.mark.only_with(SYNCD_S3="1"),
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER.exists(), reason=f"no {SERVER}: make test-mirror installs it"),
]

VERSIONS = int(os.environ.get("SYNCD_MIRROR_VERSIONS", "30"))
SEED = int(os.environ.get("SYNCD_SEED", "1"))
KILLS, CHECKS = min(0.5, 60 / VERSIONS), min(0.3, 60 / VERSIONS)
"""How likely a mirror is killed after a version, and all that has arrived is compared."""

MOST_MEMORY = 400 << 20
LARGE = (4096, 8192)


class Sites:
    """Two jobs, and the two mirrors between them."""

    def __init__(self, place, url):
        for name in ("job", "far"):
            os.mkdir(f"{place}/{name}")
        self.trainer, self.far = Trainer(Job.at(f"{place}/job"), ttl=10.0), Job.at(f"{place}/far")
        self.environment = {**environment(), **environment_of(url)}
        self.store = f"s3://weights/{os.path.basename(place)}"
        self.running, self.memory = {}, {}

    def start(self, end):
        places = [self.trainer.job.root, self.store] if end == "push" else [self.store, self.far.root]
        command = [sys.executable, "-m", "syncd", "mirror", *places, "--experiences", "--poll", "0.1"]
        with open(f"{self.far.root}-{end}.log", "ab") as log:
            self.running[end] = subprocess.Popen(command, env=self.environment, stderr=log)

    def end(self, end, number):
        self.memory[end] = max(self.memory.get(end, 0), peak(self.running[end].pid))
        self.running[end].send_signal(number)
        return self.running.pop(end).wait(60)

    def follow(self):
        """Run a follower of the far job; the file `loaded` says what its engine loaded last."""
        load = ["--hook", "command", "--stage", f"{self.far.root}-stage", "--name", "reader", "--stay"]
        engine = ["--", "/bin/sh", "-c", f"echo {{path}} > {self.loaded}"]
        command = [sys.executable, "-m", "syncd", "follow", self.far.root, *load, *engine]
        with open(f"{self.far.root}-follow.log", "ab") as log:
            self.running["follow"] = subprocess.Popen(command, env=self.environment, stderr=log)

    @property
    def loaded(self):
        return f"{self.far.root}-loaded"

    def is_loaded(self):
        reader = read_presences(self.far.disk, self.far.explorers)[0].get("reader")
        return reader is not None and reader.applied == self.trainer.pair

    def both_say(self, text):
        logs = [Path(f"{self.far.root}-{end}.log").read_text() for end in ("push", "pull")]
        return all(text in log for log in logs)

    def is_there(self):
        version = read_version(self.far)
        return version is not None and version.pair == self.trainer.pair

    def wait(self, condition, seconds=120):
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends
            self.trainer.tick()
            time.sleep(0.05)


@pytest.fixture
def sites(shm):
    with running_s3() as url:
        made = Sites(shm, url)
        yield made
        for one in made.running.values():
            one.kill()
            one.wait()


def peak(pid):
    """Return the most memory that a process has had, in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def assert_loaded(sites):
    """The follower's engine has the bits that the trainer has in memory."""
    with open(sites.loaded, encoding="utf-8") as file:
        directory = file.read().strip()
    for name, tensors in sites.trainer.tensors.items():
        there = load_file(f"{directory}/{name}")
        assert {key: value.tobytes() for key, value in there.items()} == {
            key: value.tobytes() for key, value in tensors.items()
        }


def assert_same(sites):
    step = sites.trainer.pair[1]
    assert prove(sites.far, step) == []
    while step is not None:
        assert files_of(sites.trainer.job, step) == files_of(sites.far, step)
        step = read_manifest(sites.far.disk, sites.far.step(step)).parent


@pytest.mark.timeout(3600)
def test_versions_arrive_through_kills_of_both_mirrors_and_experiences_come_back(sites):
    chance = random.Random(SEED)
    trainer, written = sites.trainer, 0
    probe = Probe(((1, 2, 3),), ((-0.5, -0.25),), "float32", "float32")
    write_base_probe(trainer.job, probe, "models/base")
    trainer.model(1)
    for end in ("push", "pull"):
        sites.start(end)
    sites.wait(sites.is_there)
    assert read_base_probe(sites.far) == probe
    sites.follow()
    with ExperienceWriter(sites.far, "e0") as writer:
        for step in range(2, VERSIONS + 1):
            if step % 10 == 0:
                trainer.model(step)
            elif step % 17 == 0:
                # The step that was rolled back from in the iteration before is gone.
                trainer.rewind(step - (2 if (step - 1) % 23 else 3))
                sites.wait(sites.is_there)
                trainer.model(step)
            elif step % 23 == 0:
                trainer.roll_back(steps_of(trainer.job)[-2])
                trainer.model(step)
            else:
                trainer.delta(step, step - 1)
            writer.write([make(tag=written)])
            written += 1
            if chance.random() < KILLS:
                end = chance.choice(["push", "pull"])
                time.sleep(chance.random() * 0.5)
                sites.end(end, signal.SIGKILL)
                sites.start(end)
            if chance.random() < CHECKS:
                sites.wait(sites.is_there)
                assert_same(sites)
                sites.wait(sites.is_loaded)
                assert_loaded(sites)
    sites.wait(sites.is_loaded)
    assert_same(sites)
    assert_loaded(sites)
    sites.wait(lambda: not any(batch_paths.numbers(sites.far, batch_paths.batches(sites.far, "e0"))))
    sites.wait(lambda: len(tasks(sites)) == written)
    assert tasks(sites) == [f"task-{number}" for number in range(written)]
    for end in ("push", "pull"):
        assert sites.end(end, signal.SIGTERM) == 0
    assert max(sites.memory.values()) < MOST_MEMORY
    print("peak MiB", {end: size >> 20 for end, size in sites.memory.items()})


def test_large_files_need_no_more_memory_than_a_few_of_their_parts(sites):
    """Four files at once, each of several parts."""
    writer = StepWriter(sites.trainer.job, 1, 1, "a")
    writer.begin()
    shards = [
        writer.write(
            f"actor/model-{number}.safetensors", shard_bytes({f"w{number}": LARGE}, number), tensors=1
        )
        for number in range(4)
    ]
    writer.receipt(1, shards)
    assert writer.publish_if_whole()
    sites.trainer.tick()
    for end in ("push", "pull"):
        sites.start(end)
    sites.wait(sites.is_there)
    for end in ("push", "pull"):
        assert sites.end(end, signal.SIGTERM) == 0
    assert prove(sites.far, 1) == []
    assert max(sites.memory.values()) < MOST_MEMORY
    print("peak MiB", {end: size >> 20 for end, size in sites.memory.items()})


def tasks(sites):
    return [one.task for batch in ExperienceReader(sites.trainer.job).poll() for one in batch.experiences]


def test_a_store_that_refuses_the_keys_for_a_while_or_is_away_is_waited_for(shm):
    with contextlib.ExitStack() as up:
        url = up.enter_context(running_s3())
        sites = Sites(shm, url)
        sites.trainer.model(1)
        for end in ("push", "pull"):
            sites.start(end)
        sites.wait(sites.is_there)
        refuse_keys(url, refused=True)
        sites.trainer.delta(2, 1)
        sites.wait(lambda: sites.both_say("the object store refuses the credentials"))
        refuse_keys(url, refused=False)
        sites.wait(sites.is_there)
        up.close()
        sites.trainer.delta(3, 2)
        sites.wait(lambda: sites.both_say("the object store does not answer"))
        # moto keeps nothing: the mirror finds an empty store, and fills it again.
        with running_s3(int(url.rpartition(":")[2])):
            sites.wait(sites.is_there)
            assert_same(sites)
            for end in ("push", "pull"):
                assert sites.end(end, signal.SIGTERM) == 0
