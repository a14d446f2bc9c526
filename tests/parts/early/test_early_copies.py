"""Steps that a stage copies while they are written: never a wrong byte, and nothing left of what was for nothing."""

import errno
import itertools
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
import xxhash
from support import forked
from support.fake_hook import FakeEngine, FakeHook, digest_of
from support.followers import QUICK, Scene
from support.job_file import tiny_job, write_job
from support.ports import free_port
from support.trainers import write_experiences
from support.waiting import LONG
from support.whole_jobs import ENVIRONMENT, RANK, alone

from explorer_hooks.follower.follower import Follower
from explorer_hooks.follower.policy import FollowOptions
from syncd.errors import ConfigError
from syncd.jobfile.sections import SyncSection
from syncd.parts.early import copy as early_copy
from syncd.parts.early import decision as early_decision
from syncd.parts.early import reader as early_reader
from syncd.parts.early.decision import AttemptKey
from syncd.parts.early.reader import EarlyReader
from syncd.protocol.disk import temporary_name
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import read_presences
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version
from syncd.protocol.write_progress import ProgressNotes, read_progress
from syncd.protocol.writer import StepWriter
from syncd.synchronizer import Synchronizer
from syncd.transports.base import SendContext, StepContent
from syncd.transports.files import stage
from syncd.transports.files.leased_directory import payload_of
from syncd.transports.files.piece_reader import OriginReader
from syncd.transports.files.send import FilesSender
from syncd.transports.files.stage import HostStage, StageSource
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.ranks import Ranks

PART = 1 << 16
SIZE = 5 * PART + 12345


def shard(seed, size=SIZE):
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return (
        len(header).to_bytes(8, "little")
        + header
        + torch.arange(seed, seed + size).to(torch.uint8).numpy().tobytes()
    )


class Attempt:
    """A step that a test writes by hand, part by part."""

    def __init__(self, job, step, writers=1, name=None):
        self.step, self.writers = (
            step,
            [StepWriter(job, step, writers, name or f"save-{step}") for _ in range(writers)],
        )
        self.contents = [shard(step + number) for number in range(writers)]
        self.names = [f"model-{number + 1:05d}-of-{writers:05d}.safetensors" for number in range(writers)]
        self.temporary = [temporary_name(name) for name in self.names]
        for writer in self.writers:
            writer.begin()
        self.path = f"{self.writers[0].path}/actor"
        self.notes = [
            writer.progress(number, f"{self.path}/{temporary}", name, len(content))
            for number, (writer, temporary, name, content) in enumerate(
                zip(self.writers, self.temporary, self.names, self.contents, strict=True), 1
            )
        ]

    def write(self, written=None, number=0, note=None):
        content = self.contents[number]
        written = len(content) if written is None else written
        with open(f"{self.path}/{self.temporary[number]}", "wb") as file:
            file.truncate(len(content))
            file.write(content[:written])
        self.notes[number]._next = 0.0
        self.notes[number].note(written if note is None else note)

    def rename(self, number=0):
        os.rename(f"{self.path}/{self.temporary[number]}", f"{self.path}/{self.names[number]}")

    def seal(self):
        for number, writer in enumerate(self.writers):
            with open(f"{self.path}/{self.names[number]}", "wb") as file:
                file.write(self.contents[number])
            record = writer.write(f"actor/{self.names[number]}", self.contents[number], tensors=1)
            files = [writer.write("actor/config.json", b"{}")] if not number else []
            writer.receipt(number + 1, [record], files)
        return self.writers[-1].seal()

    def finish(self, numbers=None):
        """Finish the files that are being copied, as a trainer does, and seal the step if it is whole."""
        for number, content in list(enumerate(self.contents))[slice(None) if numbers is None else numbers]:
            self.write(len(content), number)
            self.rename(number)
            writer, name = self.writers[number], f"actor/{self.names[number]}"
            digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
            self.notes[number].remove()
            files = [writer.write("actor/config.json", b"{}")] if not number else []
            writer.receipt(number + 1, [FileRecord(name, len(content), digest, 1)], files)
        return self.writers[-1].seal()


class Counting(OriginReader):
    def __init__(self):
        self.copied = 0

    def copy(self, wanted, target, stop):
        self.copied += sum(record.size for record in wanted.records)
        super().copy(wanted, target, stop)


class Host:
    """A follower's stage and reader."""

    def __init__(self, job, stage, events):
        self.job, self.origin = job, Counting()
        self.stage = HostStage(stage, job.root)
        self.reader = EarlyReader(
            self.origin, job, self.stage, lambda _, name, **fields: events.append((name, fields)), 0.005
        )

    def provide(self, step):
        manifest = read_manifest(self.job.disk, self.job.step(step))
        version = Version(1, step, "weights", f"global_step_{step}/actor", manifest.digest)
        records = payload_of(manifest).records
        source = StageSource(
            self.job.disk, version, f"{self.job.step(step)}/actor", records, reader=self.reader
        )
        return self.stage.provide(source)

    def close(self):
        self.reader.close()
        self.stage.close()


@pytest.fixture(autouse=True)
def _pieces(monkeypatch):
    monkeypatch.setattr(early_copy, "PIECE", PART)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def events():
    return []


@pytest.fixture
def host(job, tmp_path, events):
    with closing(Host(job, str(tmp_path / "stage"), events)) as made:
        yield made


def early_files(host):
    """Return the bytes that are there of the files that are copied early."""
    directory = host.stage.directory
    parts = (
        [name for name in os.listdir(directory) if name.startswith(".early.")]
        if os.path.isdir(directory)
        else []
    )
    return {path.name: path.read_bytes() for part in parts for path in Path(directory, part).iterdir()}


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def begun(host, length=PART, number=1):
    until(lambda: sum(len(data) >= length for data in early_files(host).values()) >= number)


def holds(copy, attempt):
    for name, content in zip(attempt.names, attempt.contents, strict=True):
        with open(f"{copy.path}/{name}", "rb") as file:
            assert file.read() == content
    assert sorted(os.listdir(copy.path)) == sorted(["config.json", *attempt.names])


def used(events):
    return [fields["bytes"] for name, fields in events if name == "early_copy_used"]


def dropped(events):
    return [fields["reason"] for name, fields in events if name == "early_copy_dropped"]


# --- the way that it is meant ---------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [1, 3])
def test_shards_are_copied_while_they_are_written(job, host, events, writers):
    attempt = Attempt(job, 1, writers)
    for number in range(writers):
        attempt.write(PART, number)
    begun(host, number=writers)
    assert not host.stage.has_copies()
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events) == [sum(map(len, attempt.contents))]
    assert host.origin.copied == len(b"{}")
    assert early_files(host) == {}
    copy.close()


def test_attempts_that_cannot_be_read_keep_no_other_from_being_copied(job, host, events, monkeypatch):
    others = {Attempt(job, 2, name=f"of-others-{number}").writers[0].path for number in range(8)}

    def read(disk, path):
        if path in others:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return read_progress(disk, path)

    monkeypatch.setattr(early_reader, "read_progress", read)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    attempt.finish()
    holds(host.provide(1), attempt)
    assert used(events) == [len(attempt.contents[0])]


def test_nothing_is_found_before_it_is_published(job, host):
    attempt = Attempt(job, 1)
    attempt.write()
    begun(host, SIZE)
    manifest = attempt.finish()
    assert host.stage.find_digest(manifest.digest) is None
    assert not host.stage.has_digest(manifest.digest)


def test_the_followers_of_a_host_copy_once(job, host, tmp_path, events):
    with closing(Host(job, str(tmp_path / "stage"), events)) as other:
        attempt = Attempt(job, 1)
        attempt.write(PART)
        begun(host)
        attempt.finish()
        hosts = sorted((host, other), key=lambda one: one.reader._held is not None)
        with ThreadPoolExecutor(2) as pool:  # the one that waits asks first
            copies = [pool.submit(one.provide, 1) for one in hosts]
            for copy in [future.result() for future in copies]:
                holds(copy, attempt)
                copy.close()
    assert host.origin.copied + other.origin.copied == len(b"{}")
    assert used(events) == [len(attempt.contents[0])]


def test_a_follower_does_not_wait_for_one_that_takes_no_version(job, host, tmp_path, events):
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    with closing(Host(job, str(tmp_path / "stage"), events)) as other:
        attempt.finish()
        copy = other.provide(1)
        holds(copy, attempt)
        until(lambda: dropped(events) == ["the stage has the version already"])
        copy.close()


def test_a_rank_that_is_done_is_copied_while_another_still_writes(job, host, events):
    attempt = Attempt(job, 1, writers=2)
    assert attempt.finish(slice(0, 1)) is None
    begun(host, len(attempt.contents[0]))
    assert list(early_files(host)) == attempt.names[:1]
    attempt.finish(slice(1, 2))
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events)[0] >= len(attempt.contents[0])
    copy.close()


def test_a_trainer_says_how_far_it_is_until_its_receipt_does(job, monkeypatch):
    heard, note = [], ProgressNotes.note

    def hear(notes, written):
        notes._next = 0.0
        note(notes, written)
        heard.append(read_progress(job.disk, job.attempt(1, "save-1")))

    monkeypatch.setattr(ProgressNotes, "note", hear)
    with closing(StepSaver(job, 0, 1)) as saver:
        saver.save(1, "save-1", {"w": torch.arange(10 << 20).bfloat16()}.items())
        saver.wait()
    steps = [progress.written for (progress,) in heard]
    assert len(steps) > 1
    assert steps == sorted(steps)
    assert steps[-1] == heard[-1][0].size
    assert os.listdir(f"{job.step(1)}/actor/.receipts") == ["00001-of-00001.json"]


@pytest.mark.parametrize("early", [True, False])
def test_a_trainer_leaves_notes_only_where_a_follower_copies_early(tmp_path, monkeypatch, early):
    noted = []
    monkeypatch.setattr(ProgressNotes, "note", lambda _, written: noted.append(written))
    settings = SyncSection(delta="off")
    with closing(Scene(tmp_path / "job")) as scene, Synchronizer.open(scene.root, "trainer") as trainer:
        scene.follow(stage=str(tmp_path / "stage"), early=early)
        trainer.beat()
        context = SendContext(scene.job, Ranks(), settings, trainer)
        with closing(FilesSender.open(context)) as sender:
            sender.send(1, "save-1", StepContent({"w": torch.ones(8)}.items))
            sender.wait()
    assert bool(noted) is early


def test_without_a_stage_it_is_refused():
    with pytest.raises(ConfigError, match="only a stage") as refused:
        FollowOptions(early=True)
    assert "--early" in refused.value.hint


def test_a_follower_loads_and_leases_nothing_before_the_version_is_published(tmp_path):
    with closing(Scene(tmp_path / "job")) as scene:
        follower = scene.follow(stage=str(tmp_path / "stage"), early=True)
        assert follower.turn(0.05).kind == "nothing"
        attempt = Attempt(scene.job, 1)
        attempt.write()
        until(lambda: [*(tmp_path / "stage").glob("*/.early.*/*.safetensors")])
        assert follower.turn(0.05).kind == "nothing"
        assert not scene.presence().leases
        assert scene.presence().loading is None
        attempt.finish()
        assert follower.turn(0.05).kind == "nothing"
        attempt.writers[0].announce()
        scene.tick()
        assert follower.turn(10.0).kind == "applied"
        assert "early_copy_used" in scene.names()


STALLS = """
import runpy, sys, time
from syncd.protocol.write_progress import ProgressNotes
from syncd.transports.files import shard

shard.PIECE, note = 1 << 16, ProgressNotes.note

def stall(notes, written):
    notes._next = 0.0
    note(notes, written)
    while ".global_step_2." in notes._path and 2 * written > notes._progress.size:
        time.sleep(1)

ProgressNotes.note = stall
sys.argv[0] = "trainer"
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""
"""A trainer that stops in the middle of the second step's only file."""


@pytest.mark.slow
def test_a_trainer_that_is_killed_in_the_middle_of_a_save_costs_its_bytes_alone(tmp_path, monkeypatch):
    job, told, engines = Job.at(tmp_path / "job"), [], [FakeEngine(), FakeEngine()]
    os.mkdir(job.root)
    write_experiences(job.root, 2)
    tables = {
        "engine": {"options": {"width": 400}},
        "sync": {"delta": "off"},
        "trainer": {"nproc": 1, "total_steps": 2, "save_interval": 1},
    }
    file = write_job(f"{job.root}.toml", tiny_job(job.root, **tables))
    environment = {**ENVIRONMENT, **RANK, "MASTER_PORT": str(free_port())}
    with ExitStack() as opened:
        followers = []
        for number, engine in enumerate(engines):
            options = FollowOptions(stage=f"{tmp_path}/stage{number}", early=True, stay=True, **QUICK)
            tell = lambda _, name, fields: told.append((name, fields))  # noqa: E731
            made = Follower.open(job.root, FakeHook(engine), f"e{number}", options, listener=tell)
            followers.append(opened.enter_context(made))
        killed = forked.start(f"{job.root}.killed.log", environment, "-c", STALLS, "train", file)
        opened.callback(killed.end)
        assert {follower.turn(LONG).kind for follower in followers} == {"applied"}, killed.said()
        until(lambda: len([*tmp_path.glob("stage*/*/.early.2-*/*.safetensors")]) == 2, LONG)
        killed.kill()
        monkeypatch.setattr(early_decision, "STILL", 0.2)
        until(lambda: not [*tmp_path.glob("stage*/*/.early.*")], LONG)
        assert {follower.turn(0.05).kind for follower in followers} == {"nothing"}
        assert [fields["version"] for name, fields in told if name == "load_started"] == ["1.1", "1.1"]
        presences = read_presences(job.disk, job.explorers)[0].values()
        assert {(presence.applied, presence.loading) for presence in presences} == {((1, 1), None)}
        again = alone(f"{job.root}.again.log", file)
        opened.callback(again.end)
        assert {follower.turn(LONG).kind for follower in followers} == {"applied"}, again.said()
        assert {engine.weights for engine in engines} == {digest_of(f"{job.step(2)}/actor")}
        assert again.wait(LONG) == 0


# --- what is copied early is not what is published ------------------------------------------------------------


def test_a_file_that_changes_after_it_was_copied_is_read_again(job, host, events):
    attempt = Attempt(job, 1)
    attempt.write()
    begun(host, SIZE)
    attempt.contents = [shard(77)]  # another file under the same name
    os.unlink(f"{attempt.path}/{attempt.temporary[0]}")
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events) in ([], [0])
    copy.close()


def test_a_file_that_changes_through_another_link_is_read_again(job, host, tmp_path, events):
    attempt = Attempt(job, 1)
    attempt.write()
    os.link(f"{attempt.path}/{attempt.temporary[0]}", tmp_path / "link")
    begun(host, SIZE)
    attempt.contents = [shard(78)]
    with open(tmp_path / "link", "r+b") as file:
        file.write(attempt.contents[0])
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    copy.close()


def test_a_note_that_says_too_much_costs_bytes_alone(job, host, events):
    attempt = Attempt(job, 1)
    attempt.write(PART, note=len(attempt.contents[0]))
    begun(host, SIZE)
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events) in ([], [0])
    copy.close()


def test_another_save_that_seals_the_step_is_what_counts(job, host, events):
    attempt = Attempt(job, 1, name="first")
    attempt.write(PART)
    begun(host)
    other = Attempt(job, 1, name="second")
    other.contents = [shard(9)]
    other.seal()
    copy = host.provide(1)
    holds(copy, other)
    copy.close()


def test_a_shard_under_another_name_is_not_taken(job, host, events):
    attempt = Attempt(job, 1)
    attempt.notes[0]._progress = attempt.notes[0]._progress.__class__(
        "save-1", 1, "model-00009-of-00009.safetensors", attempt.temporary[0], len(attempt.contents[0]), 0
    )
    attempt.write()
    begun(host, SIZE)
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    copy.close()


@pytest.mark.parametrize("key", ["name", "temporary"])
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", ""])
def test_a_note_that_names_a_file_elsewhere_does_not_count(job, key, name):
    attempt = Attempt(job, 1)
    attempt.write(PART)
    path = Path(attempt.path, ".receipts/00001-of-00001.progress")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: name}))
    assert read_progress(job.disk, attempt.writers[0].path) == []


def test_a_link_in_the_place_of_a_shard_is_not_followed(job, host, tmp_path, events):
    (tmp_path / "secret").write_bytes(shard(5))
    attempt = Attempt(job, 1)
    os.symlink(tmp_path / "secret", f"{attempt.path}/{attempt.temporary[0]}")
    attempt.notes[0].note(SIZE)
    time.sleep(0.1)
    assert early_files(host) == {}


# --- what is for nothing goes ----------------------------------------------------------------------------------


def test_an_abandoned_attempt_leaves_nothing_and_is_not_copied_again(job, host, events, monkeypatch):
    monkeypatch.setattr(early_decision, "STILL", 0.2)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    until(lambda: dropped(events) == ["the attempt is not written any more"])
    assert early_files(host) == {}
    attempt.write(2 * PART)
    time.sleep(0.1)
    assert early_files(host) == {}


def test_an_attempt_that_is_removed_leaves_nothing(job, host, events, monkeypatch):
    monkeypatch.setattr(early_decision, "LOST", 0.1)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    attempt.writers[0].discard()
    until(lambda: dropped(events) == ["the attempt was abandoned"])
    assert early_files(host) == {}


def test_after_two_copies_for_nothing_none_is_begun_until_a_version_comes(job, host, events, monkeypatch):
    monkeypatch.setattr(early_decision, "LOST", 0.05)
    for step in (1, 2):
        attempt = Attempt(job, step)
        attempt.write(PART)
        begun(host)
        attempt.writers[0].discard()
        until(lambda: len(dropped(events)) == step)  # noqa: B023
    third = Attempt(job, 3)
    third.write(PART)
    time.sleep(0.1)
    assert early_files(host) == {}
    third.finish()
    host.provide(3).close()
    fourth = Attempt(job, 4)
    fourth.write(PART)
    begun(host)


def test_what_was_there_before_and_does_not_change_is_not_copied(job, tmp_path, events):
    attempt = Attempt(job, 1)
    attempt.write(PART)
    with closing(Host(job, str(tmp_path / "stage"), events)) as late:
        time.sleep(0.1)
        assert early_files(late) == {}
        attempt.write(2 * PART)
        begun(late)


def test_a_follower_that_ends_in_the_middle_leaves_nothing(job, tmp_path, events):
    with closing(Host(job, str(tmp_path / "stage"), events)) as host:
        Attempt(job, 1).write(PART)
        begun(host)
    assert not os.path.isdir(host.stage.directory)


def test_a_follower_that_is_killed_in_the_middle_leaves_nothing_to_the_next(job, tmp_path, events):
    attempt = Attempt(job, 1)
    child = os.fork()
    if not child:
        host = Host(job, str(tmp_path / "stage"), [])
        time.sleep(60)
        os._exit(1)
    stage = str(tmp_path / "stage")
    parts = itertools.cycle((PART, 2 * PART))

    def has_begun():
        attempt.write(next(parts))  # what does not change is not copied
        return any(name.startswith(".early.") for _, names, _ in os.walk(stage) for name in names)

    try:
        until(has_begun)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with closing(Host(job, stage, events)) as host:
        assert early_files(host) == {}
        attempt.finish()
        copy = host.provide(1)
        holds(copy, attempt)
        copy.close()


# --- the room of the stage -------------------------------------------------------------------------------------


def test_without_room_nothing_is_begun(job, host, monkeypatch):
    monkeypatch.setattr(host.stage, "free", lambda: SIZE)
    Attempt(job, 1).write(PART)
    time.sleep(0.1)
    assert early_files(host) == {}


def test_a_stage_that_gets_full_meanwhile_loses_the_copy_alone(job, host, events, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(early_copy, "write_all_at", full)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    until(lambda: len(dropped(events)) == 1)
    assert early_files(host) == {}
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    copy.close()


def limit_room(hosts, size, monkeypatch):
    """Have the stage be a disk of a size, on which every file counts until nobody has it open."""
    directory = hosts[0].stage.directory

    def free(_):
        paths = [f"{path}/{name}" for path, _, names in os.walk(directory) for name in names]
        files = [found for path in (*paths, *removed_files(directory)) if (found := stat_if_there(path))]
        # A file whose pieces come in another order has holes meanwhile, which take no room.
        return size - sum(min(file.st_size, 512 * file.st_blocks) for file in files)

    monkeypatch.setattr(stage, "_LET_GO", LONG)
    for host in hosts:
        monkeypatch.setattr(host.stage._disk, "free", free)


def stat_if_there(path):
    with suppress(FileNotFoundError):
        return os.stat(path)
    return None


def removed_files(directory):
    """Return descriptors of files below a directory that this process has open although they are removed."""
    opened = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(directory) and target.endswith(".safetensors (deleted)"):
                opened[target] = f"/proc/self/fd/{name}"
    return list(opened.values())


def test_an_early_copy_needs_no_room_beside_the_version(job, host, events, monkeypatch):
    limit_room([host], SIZE + 4096, monkeypatch)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    copy.close()
    assert used(events) == [len(attempt.contents[0])]


def test_a_version_takes_the_room_of_the_next_one(job, host, events, monkeypatch):
    first = Attempt(job, 1)
    host.reader._tried.add(AttemptKey(1, "save-1"))  # it is there before, so it is not copied early
    first.seal()
    limit_room([host], SIZE + PART, monkeypatch)
    second = Attempt(job, 2)
    second.write(2 * PART)
    begun(host, 2 * PART)
    copy = host.provide(1)
    holds(copy, first)
    until(lambda: "its room was needed, or it could not be written" in dropped(events))
    copy.close()


def test_a_version_takes_the_room_of_its_own_early_copy_that_another_follower_holds(
    job, host, tmp_path, events, monkeypatch
):
    attempt = Attempt(job, 1)
    attempt.write()
    begun(host, SIZE)  # its engine takes no version
    with closing(Host(job, str(tmp_path / "stage"), [])) as other:
        limit_room([host, other], SIZE + PART, monkeypatch)
        attempt.finish()
        copy = other.provide(1)
        holds(copy, attempt)
        until(lambda: dropped(events) == ["its room was needed, or it could not be written"])
        copy.close()


def test_room_that_a_hanging_mount_holds_is_free_once_it_answers(job, host, events, monkeypatch):
    answered, hanging, read = threading.Event(), threading.Event(), early_copy._EarlyFile._read_some

    def hang(file, memory, offset):
        if offset >= 2 * PART:
            hanging.set()
            answered.wait(LONG)
        return read(file, memory, offset)

    monkeypatch.setattr(early_copy._EarlyFile, "_read_some", hang)
    monkeypatch.setattr(early_copy, "_JOIN", 0.05)
    monkeypatch.setattr(early_decision, "STILL", 0.2)
    Attempt(job, 1).write()
    try:
        until(hanging.is_set)
        until(lambda: dropped(events) == ["the attempt is not written any more"])
        assert early_files(host) == {}
        assert removed_files(host.stage.directory)
    finally:
        answered.set()
    until(lambda: not removed_files(host.stage.directory))


def need_room(job, tmp_path):
    """Have another follower of the host take the room of all that is copied early, for another version."""
    HostStage(str(tmp_path / "stage"), job.root)._revoke_early(None)


def test_room_that_is_taken_while_the_rest_is_read_costs_no_version(job, host, tmp_path, events, monkeypatch):
    read = Counting.copy

    def read_rest(*asked):
        need_room(job, tmp_path)
        read(*asked)

    monkeypatch.setattr(Counting, "copy", read_rest)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events) == [len(attempt.contents[0])]
    copy.close()


def test_files_whose_room_is_taken_before_they_are_moved_are_read_again(
    job, host, tmp_path, events, monkeypatch
):
    finish = early_copy.EarlyCopy.finish

    def finish_too_late(*asked):
        whole = finish(*asked)
        need_room(job, tmp_path)
        return whole

    monkeypatch.setattr(early_copy.EarlyCopy, "finish", finish_too_late)
    attempt = Attempt(job, 1)
    attempt.write(PART)
    begun(host)
    attempt.finish()
    copy = host.provide(1)
    holds(copy, attempt)
    assert used(events) == [0]
    assert host.origin.copied == len(attempt.contents[0]) + len(b"{}")
    copy.close()


def test_a_copy_that_is_removed_while_it_is_made_says_nothing_about_the_step(tmp_path, monkeypatch):
    asked, read = [], OriginReader.copy

    def read_and_lose(reader, wanted, target, stop):
        read(reader, wanted, target, stop)
        asked.append(target)
        if len(asked) == 1:
            shutil.rmtree(target)

    monkeypatch.setattr(OriginReader, "copy", read_and_lose)
    with closing(Scene(tmp_path / "job")) as scene:
        scene.publish(1)
        follower = scene.follow(stage=str(tmp_path / "stage"))
        assert follower.turn(LONG).kind == "applied"
        assert "load_failed" in scene.names()
    assert len(asked) == 2
