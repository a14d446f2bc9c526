"""One copy a host: real processes that share it, and what is left when one of them is killed or stopped."""

import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.cli import environment

import syncd.transports.files.stage
from syncd.errors import ConfigError, RefusedError, TryAgainError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest
from syncd.protocol.mount import Mount
from syncd.protocol.version import Version
from syncd.protocol.writer import StepWriter
from syncd.transports.files.leased_directory import payload_of
from syncd.transports.files.stage import HostStage, StageFullError, StageSource

PROGRAM = Path(__file__).parent / "programs" / "take.py"
NOBODY = 65534
ROWS = 3 << 16
"""Rows of 8 floats of each shard: two reads a shard."""


def write_large(job, step, shards=2):
    """Write a step whose shards take several reads each; return its manifest."""
    writer = StepWriter(job, step, 1, f"save-{step}")
    writer.begin()
    names = [f"actor/model-{place:05d}-of-{shards:05d}.safetensors" for place in range(1, shards + 1)]
    records = [writer.write(name, _shard(f"w{place}"), tensors=1) for place, name in enumerate(names)]
    writer.receipt(1, records)
    return writer.seal()


def _shard(name):
    header = json.dumps({name: {"dtype": "F32", "shape": [ROWS, 8], "data_offsets": [0, ROWS * 32]}}).encode()
    return [len(header).to_bytes(8, "little") + header, bytes(ROWS * 32)]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def take(job, tmp_path):
    started = []

    def start(step=1, die=""):
        command = [sys.executable, str(PROGRAM), str(tmp_path / "stage"), job.root, str(step), die]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment())
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    return json.loads(process.stdout.readline())


def killed(process):
    assert process.stdout.read() == ""
    assert process.wait() == -signal.SIGKILL


def ended(process):
    process.communicate("")
    assert process.returncode == 0


def left(tmp_path):
    return sorted(path.relative_to(tmp_path / "stage") for path in (tmp_path / "stage").rglob("*"))


def source_of(job, step, manifest):
    digest = read_manifest(job.disk, job.step(step)).digest
    version = Version(1, step, "weights", f"global_step_{step}/actor", digest)
    return StageSource(job.disk, version, f"{job.step(step)}/actor", payload_of(manifest).records)


def test_processes_on_a_host_read_each_byte_once_together(job, take, tmp_path, record_line):
    manifest = write_large(job, 1)
    processes = [take() for _ in range(4)]
    found = [said(process) for process in processes]
    total = sum(one["bytes"] for one in found)
    record_line(f"stage: {len(found)} processes read {total} bytes of a step of {manifest.size}")
    assert total == manifest.size
    assert len({one["path"] for one in found}) == 1
    assert all(one["whole"] for one in found)
    for process in processes:
        assert os.path.isdir(found[0]["path"])
        ended(process)
    assert left(tmp_path) == []


@pytest.mark.parametrize("die", ["read:1", "read:2", "read:4", "rename", "renamed"])
def test_the_partial_copy_of_a_killed_process_is_never_used_and_is_removed(job, take, tmp_path, die):
    manifest = write_large(job, 1)
    killed(take(die=die))
    assert left(tmp_path)
    processes = [take() for _ in range(2)]
    found = [said(process) for process in processes]
    assert all(one["whole"] for one in found)
    # What was renamed is whole, and the newest copy outlives its process: another version may be made of it.
    assert sum(one["bytes"] for one in found) == (0 if die == "renamed" else manifest.size)
    for process in processes:
        ended(process)
    assert left(tmp_path) == []


def flip_through_a_mapping(copy):
    """Flip a bit of a copy in the way that leaves its times as they are."""
    path = next(Path(copy).glob("*.safetensors"))
    before = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[-1] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_a_file(copy):
    (Path(copy) / "model-extra.safetensors").write_bytes(_shard("w1")[0])


def cut(copy):
    os.truncate(next(Path(copy).glob("*.safetensors")), 100)


def swap_for_a_link(copy):
    path = next(Path(copy).glob("*.safetensors"))
    path.rename(Path(copy).parent / "elsewhere")
    path.symlink_to(Path(copy).parent / "elsewhere")


CHANGES = [flip_through_a_mapping, add_a_file, cut, swap_for_a_link]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_copy_that_was_changed_is_never_given_to_another_process(job, take, change, is_used):
    manifest = write_large(job, 1)
    first = take()
    path = said(first)["path"]
    if not is_used:
        first.kill()
        first.communicate()
    change(path)
    processes = [take() for _ in range(3)]
    copies = [said(process) for process in processes]
    assert all(copy["whole"] for copy in copies)
    assert sum(copy["bytes"] for copy in copies) == manifest.size
    assert not os.path.exists(f"{path}/model-extra.safetensors")


def test_a_damaged_copy_is_reported(job, tmp_path):
    source, heard = source_of(job, 1, write_large(job, 1)), []
    stage = HostStage(str(tmp_path / "stage"), job.root)
    first = stage.provide(source)
    flip_through_a_mapping(first.path)
    second = stage.provide(source, report=lambda level, name, **fields: heard.append((level, name, fields)))
    assert [(level, name, fields["path"]) for level, name, fields in heard] == [
        ("warning", "stage_copy_damaged", first.path)
    ]
    stage.discard(first)  # it has gone already: what was made instead stays
    assert os.path.isdir(second.path)
    second.close()


def test_a_waiting_process_takes_over_from_a_killed_copier(job, take):
    manifest = write_large(job, 1)
    first = take(die="stop:2")
    os.waitpid(first.pid, os.WUNTRACED)
    others = [take() for _ in range(2)]
    first.kill()
    found = [said(process) for process in others]
    assert all(one["whole"] for one in found)
    assert sum(one["bytes"] for one in found) == manifest.size


def test_a_stopped_copier_is_not_waited_for(job, take):
    manifest = write_large(job, 1)
    first = take(die="stop:2")
    os.waitpid(first.pid, os.WUNTRACED)
    other = take()
    found = said(other)
    assert (found["whole"], found["bytes"]) == (True, manifest.size)
    first.send_signal(signal.SIGCONT)
    late = said(first)
    assert late["whole"]
    assert late["path"] != found["path"]


def test_a_copy_is_kept_while_in_use_and_then_removed(job, take, tmp_path):
    for step in (1, 2):
        write_large(job, step)
    old, new = take(1), take(2)
    paths = [said(old)["path"], said(new)["path"]]
    ended(new)
    assert [os.path.isdir(path) for path in paths] == [True, False]
    old.kill()
    old.communicate()
    third = take(2)
    assert said(third)["path"] == paths[1]
    assert [os.path.isdir(path) for path in paths] == [False, True]
    ended(third)
    assert left(tmp_path) == []


def test_a_stage_is_readable_by_its_owner_only(job, tmp_path):
    manifest = write_large(job, 1)
    staged = HostStage(str(tmp_path / "stage"), job.root).provide(source_of(job, 1, manifest))
    modes = {
        stat.S_IMODE(os.lstat(path).st_mode)
        for path in [tmp_path / "stage", *(tmp_path / "stage").rglob("*")]
    }
    assert modes == {0o700, 0o600}
    staged.close()


def test_a_stage_that_others_may_use_is_refused(job, tmp_path):
    stage = HostStage(str(tmp_path / "stage"), job.root)
    own = next((tmp_path / "stage").iterdir())
    own.chmod(0o770)
    with pytest.raises(ConfigError, match="others may use"):
        HostStage(str(tmp_path / "stage"), job.root)
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="others may use"):
        HostStage(str(tmp_path / "stage"), job.root)
    stage.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users: needs root")
def test_a_stage_of_another_user_is_not_shared(job):
    place = tempfile.mkdtemp(dir="/dev/shm")
    os.chmod(place, 0o1777)
    first = HostStage(f"{place}/stage", job.root)
    os.seteuid(NOBODY)
    try:
        HostStage(f"{place}/stage", job.root)
        own = Path(f"{place}/stage.{NOBODY}")
        assert (own.stat().st_uid, stat.S_IMODE(own.stat().st_mode)) == (NOBODY, 0o700)
        assert len(list(own.iterdir())) == 1
        own.chmod(0o755)
        with pytest.raises(ConfigError, match="others may use"):
            HostStage(f"{place}/stage", job.root)
    finally:
        os.seteuid(0)
        first.close()
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users: needs root")
def test_a_directory_that_another_user_opened_for_all_is_no_stage(job):
    """He could swap the private directory in it: what he has planted would count as a copy that was checked."""
    place = tempfile.mkdtemp(dir="/dev/shm")
    os.chmod(place, 0o1777)
    os.mkdir(f"{place}/stage")
    os.chown(f"{place}/stage", NOBODY, NOBODY)
    os.chmod(f"{place}/stage", 0o777)
    try:
        stage = HostStage(f"{place}/stage", job.root)
        staged = stage.provide(source_of(job, 1, write_large(job, 1)))
        assert staged.path.startswith(f"{place}/stage.{os.geteuid()}/")
        staged.close()
        stage.close()
        os.chmod(place, 0o777)
        with pytest.raises(ConfigError, match="everybody can write to it") as refused:
            HostStage(f"{place}/stage", job.root)
        assert refused.value.path == place
    finally:
        shutil.rmtree(place)


def test_a_stage_below_a_directory_that_everybody_can_change_is_refused(job, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody can write to it"):
        HostStage(str(tmp_path / "open/stage"), job.root)


def test_a_stage_on_a_network_mount_is_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr(syncd.transports.files.stage, "mount_of", lambda _: Mount("/", "nfs4"))
    with pytest.raises(ConfigError, match="local"):
        HostStage(str(tmp_path / "stage"), job.root)


def test_copies_of_an_earlier_boot_are_removed(job, tmp_path):
    stage = HostStage(str(tmp_path / "stage"), job.root)
    own = next((tmp_path / "stage").iterdir())
    earlier = own.with_name(f"{own.name.rpartition('.')[0]}.0123abcd")
    earlier.mkdir(0o700)
    (earlier / "1.1-abc").mkdir()
    (earlier / "1.1-abc" / "model.safetensors").touch()
    (tmp_path / "stage" / "of somebody else").mkdir()
    stage.sweep()
    assert not earlier.exists()
    assert (tmp_path / "stage" / "of somebody else").exists()


def test_what_cannot_be_removed_keeps_nothing_else_in_a_stage(job, tmp_path):
    stage = HostStage(str(tmp_path / "stage"), job.root)
    own = next((tmp_path / "stage").iterdir())
    others = [own.with_name(f"{name}-01234567.0123abcd") for name in ("first", "second")]
    for other in others:
        other.mkdir(0o700)
        (other / "1.1-abc.lock").mkdir()  # no process can lock it
        (other / "1.2-abc").mkdir()
    stage.sweep()
    assert [os.listdir(other) for other in others] == [["1.1-abc.lock"], ["1.1-abc.lock"]]


def test_a_damaged_step_is_never_staged(job, tmp_path):
    manifest = write_large(job, 1)
    with open(f"{job.step(1)}/{manifest.shards[1].name}", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    stage = HostStage(str(tmp_path / "stage"), job.root)
    with pytest.raises(RefusedError, match="digest"):
        stage.provide(source_of(job, 1, manifest))
    stage.close()
    assert left(tmp_path) == []


def test_a_stop_request_ends_a_copy(job, tmp_path):
    manifest = write_large(job, 1)
    stage = HostStage(str(tmp_path / "stage"), job.root)
    asked = []
    stop = lambda: asked.append(1) is None and len(asked) > 3  # noqa: E731
    with pytest.raises(TryAgainError, match="given up"):
        stage.provide(source_of(job, 1, manifest), stop)
    stage.close()
    assert left(tmp_path) == []


class SmallDisk(LocalDisk):
    room = 0

    def free(self, path):
        return self.room


def test_a_stage_without_space_is_refused_until_there_is_room(job, tmp_path):
    manifest = write_large(job, 1)
    stage = HostStage(str(tmp_path / "stage"), job.root)
    stage._disk = SmallDisk()
    stage._disk.room = manifest.size - 1
    with pytest.raises(StageFullError, match="do not fit") as caught:
        stage.provide(source_of(job, 1, manifest))
    assert caught.value.hint.startswith("df -h")
    stage._disk.room = manifest.size
    stage.provide(source_of(job, 1, manifest)).close()


def test_a_disk_that_fills_up_during_a_copy_is_a_full_stage(job, tmp_path, monkeypatch):
    manifest = write_large(job, 1)
    stage = HostStage(str(tmp_path / "stage"), job.root)
    full = lambda _: open("/dev/full", "wb")  # noqa: E731, SIM115
    monkeypatch.setattr("syncd.transports.files.copy_files.new_file", full)
    with pytest.raises(StageFullError):
        stage.provide(source_of(job, 1, manifest))
    stage.close()
    assert left(tmp_path) == []
