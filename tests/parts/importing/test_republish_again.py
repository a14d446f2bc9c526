"""`trainer republish` replaces a step that the first job wrote again, the newest one too, whatever kills it.

The first job is a stand-in. The second one has a daemon, which ticks in this process while the republisher waits.
"""

import contextlib
import itertools
import multiprocessing
import signal
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support import checker
from support.failing_calls import Fault
from support.jobs import ManualClock, shard_bytes, start, steps_of
from support.processes import FULL

from syncd.cli.main import run
from syncd.client.client import Client
from syncd.client.follow import Leased
from syncd.errors import CorruptDataError
from syncd.protocol.layout import Job
from syncd.protocol.request import Pin, remove_pin, write_pin
from syncd.protocol.version import Version, read_version
from trainer.parts.importing import republish

EVERY = 1 if FULL else 11
"""Of so many calls one is the last of a process in `make test`."""

SHAPES = {"model.norm.weight": (4, 8)}
ALONE = "there is no earlier step to serve"


class FirstJob:
    """A job of another trainer, as far as the republisher asks it: the newest version, and a lease of its files."""

    def __init__(self, root):
        self.job, self._generations = Job.at(root), itertools.count(1)
        self.newest = self.confirmed = None

    def write(self, step, content):
        """Write a step, maybe again; its digest is its content."""
        path = f"{self.job.root}/global_step_{step}"
        self.job.disk.make_directory(path)
        self.job.disk.replace(f"{path}/model.safetensors", shard_bytes(SHAPES, content))
        self.newest = Version(next(self._generations), step, "weights", path, str(content), layout="verl")

    @contextlib.contextmanager
    def lease(self, version):
        yield Leased(version, version.path, None)

    def confirm(self, pair):
        self.confirmed = pair


class Republisher:
    """A republisher and its daemon, as of one process; the clock goes on from one process to the next."""

    clock = ManualClock()

    def __init__(self, first, out, monkeypatch):
        monkeypatch.setattr(subprocess, "run", self._publish)
        self._first, self.said = first, []
        # Each leader takes over the trash that is left, by one call for each step: here none is left.
        self._daemon = start(Job.at(out), self.clock, trash_grace=0.0)[0]
        self._client = Client.open(
            out, "trainer", republish.NAME, clock=self.clock, heartbeat=False,
            on_wait=lambda *_: self._daemon.tick(woken=True),
        )  # fmt: skip
        self._copier = republish.StepCopier(first, self._client, self.said.append, None)

    def copy(self, times=30):
        """Try to copy the newest version; return whether that is then published."""
        for _ in range(times):
            self._daemon.tick(woken=True)
            self.clock.sleep(0.1)
            if self._first.confirmed != self._first.newest.pair:
                self._copier.copy(self._first.newest)
        return content_of(self._client.job) == (self._first.newest.step, int(self._first.newest.digest))

    def close(self):
        self._client.close()
        self._daemon.close()

    @staticmethod
    def _publish(command, **_):
        return SimpleNamespace(returncode=run(command[command.index("syncd") + 1 :]))


@pytest.fixture
def first(tmp_path):
    return FirstJob(tmp_path / "verl")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "ours").mkdir()
    return Job.at(tmp_path / "ours")


@pytest.fixture
def republisher(first, out, monkeypatch):
    with contextlib.closing(Republisher(first, out.root, monkeypatch)) as one:
        yield one


def content_of(out):
    """Return the published step and the content with which the first job wrote it."""
    version = read_version(out)
    data = out.disk.read(f"{out.root}/{version.path}/model.safetensors")
    return version.step, next(content for content in range(251) if data == shard_bytes(SHAPES, content))


@pytest.mark.parametrize(
    "steps", [(1, 2, 2, 2), (1, 2, 3, 2), (1, 2, 3, 4, 3), (1, 2, 3, 2, 3), (5, 6, 5, 4, 5, 4)]
)
def test_a_step_that_was_written_again_is_replaced(first, out, republisher, steps):
    for content, step in enumerate(steps):
        first.write(step, content)
        assert republisher.copy(), republisher.said
    assert republisher.said == []
    assert checker.problems(out.root) == []


@pytest.mark.parametrize("moves", list(itertools.product((1, 0, -1), repeat=2)))
def test_only_what_is_served_and_has_no_earlier_step_waits_for_the_next_one(first, out, republisher, moves):
    step, was_alone = 5, False
    for content, move in enumerate((0, 0, 1, *moves, 0, 1)):
        step += move
        is_alone = content > 0 and read_version(out).step == step == steps_of(out)[0]
        first.write(step, content)
        assert republisher.copy() != is_alone
        assert [text for text in republisher.said if ALONE not in text] == []
        assert len(republisher.said) == (is_alone and not was_alone), "it says so once"
        republisher.said.clear()
        was_alone = is_alone
    assert not is_alone


def test_a_step_that_somebody_has_pinned_waits_until_it_is_let_go(first, out, republisher):
    for step in (1, 2):
        first.write(step, step)
        assert republisher.copy()
    write_pin(out, Pin(2, "tests", 0.0))
    first.write(2, 3)
    assert not republisher.copy(times=3)
    assert ["the daemon keeps step 2" in text for text in republisher.said] == [True]
    remove_pin(out, 2)
    assert republisher.copy()


def replace_until(first, out, monkeypatch, at):
    """Copy the newest version as a process of its own does, whose call of a number is its last."""
    with contextlib.closing(Republisher(first, out.root, monkeypatch)) as one, Fault(out.root, "KILL", at):
        one.copy()


def test_a_republisher_killed_at_any_call_is_followed_by_one_that_replaces_the_step(
    first, out, monkeypatch, record_line
):
    with contextlib.closing(Republisher(first, out.root, monkeypatch)) as one:
        for step in (1, 2):
            first.write(step, step)
            assert one.copy()
    for content in itertools.count(3):
        first.write(2, content)
        killed = multiprocessing.get_context("fork").Process(
            target=replace_until, args=(first, out, monkeypatch, 1 + (content - 3) * EVERY)
        )
        killed.start()
        killed.join(120)
        assert killed.exitcode in (0, -signal.SIGKILL)
        assert checker.problems(out.root) == []
        assert content_of(out) in [(1, 1), (2, content - 1), (2, content)]
        with contextlib.closing(Republisher(first, out.root, monkeypatch)) as one:
            assert one.copy(), one.said
        if not killed.exitcode:
            break
        Republisher.clock.sleep(
            100.0
        )  # else each new leader takes over the trash of all before: more and more calls
    record_line(f"SIGKILL at {content - 3} calls of the replacement of a step")


def test_a_record_of_copied_steps_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / republish.RECORD).write_text("[" * 100_000)
    with pytest.raises(CorruptDataError, match="not a record of imported steps"):
        republish._read_record(Job.at(tmp_path), f"{tmp_path}/{republish.RECORD}")
