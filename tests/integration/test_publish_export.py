"""`syncd publish` makes a step of what is whole and finite, and refuses the rest before anything is in the job."""

import errno
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys

import pytest
from support.cli import ROOT, environment
from support.jobs import shard_bytes, start, write_step
from support.publishing import publish_directory

from syncd.errors import AlreadySealedError, CorruptDataError, NonFiniteError, UsageError
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, missing_files, read_manifest
from syncd.protocol.probe import Probe, encode_probe, read_base_probe
from syncd.protocol.version import read_marker
from syncd.publishing import FollowingDisk, publish_export, read_export

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
MAP = {"a": ONE, "b": TWO}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def export(tmp_path):
    """Return a whole export of two shards with an index."""
    source = tmp_path / "export"
    source.mkdir()
    (source / ONE).write_bytes(shard_bytes({"a": (3, 3)}))
    (source / TWO).write_bytes(shard_bytes({"b": (5,)}))
    (source / "config.json").write_text("{}")
    write_index(source, MAP)
    return source


def write_index(source, weight_map):
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def is_untouched(job):
    """Say whether a job has no step and no marker, and nothing that becomes one."""
    return os.listdir(job.root) == []


def has_only(job, *steps):
    """Say whether a job has these steps, and no attempt to write one."""
    found = {name for name in os.listdir(job.root) if "global_step" in name}
    return found == {f"global_step_{step}" for step in steps}


def is_whole(job, step):
    manifest = read_manifest(job.disk, job.step(step))
    path = job.step(step)
    return not missing_files(job.disk, path, manifest) and not damaged_files(job.disk, path, manifest)


def refused(shell, job, export, said, code=65):
    """Publish, and check that it is refused with a reason and a hint, and that nothing is left of it."""
    done = shell("publish", job.root, 7, export)
    assert done.code == code, done.err
    assert said in done.err
    assert "\nhint: " in done.err
    assert is_untouched(job)


# --- complete, or refused ---------------------------------------------------------------------------------------


def test_a_complete_export_is_published(shell, job, export):
    assert shell("publish", job.root, 7, export).code == 0
    assert is_whole(job, 7)


PROBE = Probe(((5, 6, 7),), ((-0.5, -2.25),), "float32", "keep")


def test_a_step_is_published_with_the_probe_of_a_file(shell, job, export, tmp_path):
    (tmp_path / "made.json").write_bytes(encode_probe(PROBE))
    os.symlink("made.json", tmp_path / "probe.json")
    assert shell("publish", job.root, 7, export, "--probe", tmp_path / "probe.json").code == 0
    assert is_whole(job, 7)
    assert read_manifest(job.disk, job.step(7)).probe == PROBE
    assert shell("publish", job.root, 8, export).code == 0
    assert read_manifest(job.disk, job.step(8)).probe is None


def test_the_baseline_is_recorded_once_a_job(shell, job, export, tmp_path):
    other = Probe(PROBE.tokens, ((-1.5, -3.0),), "float32", "keep")
    for step, probe in ((7, PROBE), (8, other)):
        (tmp_path / "base.json").write_bytes(encode_probe(probe))
        assert shell("publish", job.root, step, export, "--baseline", tmp_path / "base.json").code == 0
        assert read_base_probe(job) == PROBE
    done = shell("publish", job.root, 9, export, "--baseline", tmp_path / "nothing.json")
    assert (done.code, "the probe's file does not exist" in done.err) == (2, True)


def _incomplete(shell, job, export):
    os.unlink(export / TWO)


def _not_finite(shell, job, export):
    poison(export / TWO, float("nan"), 0)


def _exists(shell, job, export):
    assert shell("publish", job.root, 7, export).code == 0


def _below_the_newest(shell, job, export):
    assert shell("publish", job.root, 9, export).code == 0


@pytest.mark.parametrize("spoil", [_incomplete, _not_finite, _exists, _below_the_newest])
def test_a_publish_that_is_refused_leaves_no_baseline(shell, job, export, tmp_path, spoil):
    (tmp_path / "base.json").write_bytes(encode_probe(PROBE))
    spoil(shell, job, export)
    assert shell("publish", job.root, 7, export, "--baseline", tmp_path / "base.json").code != 0
    assert read_base_probe(job) is None


def test_the_baseline_is_recorded_before_a_daemon_can_publish_the_step(job, export):
    disk, there = FollowingDisk(), []
    publish_export(
        job,
        7,
        disk,
        read_export(disk, str(export)),
        before_seal=lambda: there.append(os.path.exists(job.step(7))),
    )
    assert there == [False]


def test_the_call_that_announces_a_sealed_step_records_the_baseline(shell, job, export, tmp_path):
    write_unannounced(job, export)
    (tmp_path / "base.json").write_bytes(encode_probe(PROBE))
    assert shell("publish", job.root, 7, export, "--baseline", tmp_path / "base.json").code == 0
    assert read_base_probe(job) == PROBE


def test_a_step_that_no_marker_names_is_announced_with_the_same_probe_only(job, export):
    publish_directory(job, 7, str(export), probe=PROBE)
    os.unlink(job.marker)
    with pytest.raises(AlreadySealedError):
        publish_directory(job, 7, str(export))
    assert read_marker(job.disk, job.marker).step is None
    publish_directory(job, 7, str(export), probe=PROBE)
    assert read_marker(job.disk, job.marker).step == 7


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 2, "the probe's file does not exist"),
        (b"{}", 65, "'protocol'"),
        (b"[", 65, "not a JSON document"),
        (b'{"protocol":99}', 78, "upgrade syncd"),
        (encode_probe(PROBE).replace(b"-2.25", b"null"), 65, "log-prob"),
        (encode_probe(PROBE).replace(b"7]", b"8]"), 65, "digest"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(shell, job, export, tmp_path, content, code, said):
    if content is not None:
        (tmp_path / "probe.json").write_bytes(content)
    done = shell("publish", job.root, 7, export, "--probe", tmp_path / "probe.json")
    assert (done.code, said in done.err) == (code, True), done.err
    assert is_untouched(job)


def test_an_export_without_a_shard_of_its_index_and_numbers_is_refused(shell, job, export):
    (export / TWO).unlink()
    refused(shell, job, export, f"{INDEX} names '{TWO}', which does not exist")


def test_an_export_without_a_shard_of_its_numbers_is_refused(shell, job, export):
    (export / TWO).unlink()
    (export / INDEX).unlink()
    refused(shell, job, export, "shard 2 of 2 of model is missing")


def test_an_export_without_a_shard_of_its_index_is_refused(shell, job, export):
    (export / ONE).rename(export / "first.safetensors")
    (export / TWO).unlink()
    write_index(export, {"a": "first.safetensors", "b": "second.safetensors"})
    refused(shell, job, export, "'second.safetensors', which does not exist")


def test_an_index_that_places_a_tensor_in_the_wrong_shard_is_refused(shell, job, export):
    write_index(export, {"a": TWO, "b": TWO})
    refused(shell, job, export, f"'a' in {TWO}, and it is in {ONE}")


def test_an_index_that_names_a_missing_tensor_is_refused(shell, job, export):
    write_index(export, {**MAP, "lm_head.weight": TWO})
    refused(shell, job, export, f"'lm_head.weight' in {TWO}, and no shard holds it")


def test_a_shard_outside_the_index_is_refused(shell, job, export):
    (export / "consolidated.safetensors").write_bytes(shard_bytes({"c": (2,)}))
    refused(shell, job, export, "no index names consolidated.safetensors")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 9999]
)
def test_an_invalid_index_is_refused(shell, job, export, text):
    (export / INDEX).write_text(text)
    refused(shell, job, export, INDEX)


def test_a_tensor_in_two_shards_is_refused(shell, job, export):
    (export / INDEX).unlink()
    (export / TWO).write_bytes(shard_bytes({"a": (3, 3)}))
    refused(shell, job, export, "two shards hold tensor 'a'")


def test_an_export_without_tensors_is_refused(shell, job, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/model.safetensors").write_bytes(shard_bytes({}))
    refused(shell, job, tmp_path / "empty", "its shards hold no tensor")


def test_an_adapter_without_its_configuration_is_refused(shell, job, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(shard_bytes({"lora_A": (2, 2)}))
    refused(shell, job, tmp_path / "adapter", "without adapter_config.json")


def test_an_adapter_beside_a_model_is_refused(shell, job, export):
    (export / INDEX).unlink()
    (export / "adapter_model.safetensors").write_bytes(shard_bytes({"lora_A": (2, 2)}))
    (export / "adapter_config.json").write_text("{}")
    refused(shell, job, export, "in one directory with the weights of a model")


def test_files_that_are_not_copied_are_listed(shell, job, export):
    (export / "nested").mkdir()
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", ".hidden.json"):
        (export / name).write_text("x")
    done = shell("publish", job.root, 7, export)
    assert done.code == 0
    assert "not copied: .hidden.json, README.md, nested/, optimizer.pt, pytorch_model.bin\n" in done.err
    skipped = [".hidden.json", "README.md", "nested/", "optimizer.pt", "pytorch_model.bin"]
    assert shell("publish", job.root, 8, export, "--json").document["skipped"] == skipped
    assert sorted(os.listdir(f"{job.step(7)}/actor")) == sorted([".receipts", ONE, TWO, INDEX, "config.json"])


def test_an_export_that_changes_during_the_copy_is_refused(job, export):
    class Late(FollowingDisk):
        def read_at(self, path, offset, length):
            if path.endswith(TWO) and length > 1 << 20:
                os.utime(path, (1, 1))
            return super().read_at(path, offset, length)

    with pytest.raises(CorruptDataError, match="changed while it was copied"):
        publish_directory(job, 7, str(export), outside=Late())
    assert is_untouched(job)


# --- links ------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path, export):
    """Return the export as the Hugging Face cache has it: links to files outside of the directory."""
    (tmp_path / "hub/blobs").mkdir(parents=True)
    (tmp_path / "hub/snapshots/c0ffee").mkdir(parents=True)
    for number, name in enumerate(sorted(os.listdir(export))):
        (export / name).rename(tmp_path / f"hub/blobs/{number}")
        (tmp_path / "hub/snapshots/c0ffee" / name).symlink_to(f"../../blobs/{number}")
    return tmp_path / "hub/snapshots/c0ffee"


def test_links_to_files_become_regular_files(shell, job, snapshot):
    assert shell("publish", job.root, 7, snapshot).code == 0
    actor = f"{job.step(7)}/actor"
    for name in (ONE, TWO, INDEX, "config.json"):
        assert stat.S_ISREG(os.lstat(f"{actor}/{name}").st_mode)
        with open(f"{actor}/{name}", "rb") as file:
            assert file.read() == (snapshot / name).read_bytes()
    assert is_whole(job, 7)


def test_an_export_named_by_a_symbolic_link_is_published(shell, job, snapshot, tmp_path):
    (tmp_path / "main").symlink_to(snapshot)
    assert shell("publish", job.root, 7, tmp_path / "main").code == 0
    assert is_whole(job, 7)


def test_files_behind_chains_of_links_are_published(shell, job, snapshot, tmp_path):
    (tmp_path / "again").mkdir()
    for name in (ONE, TWO, INDEX):
        (tmp_path / "again" / name).symlink_to(snapshot / name)
    assert shell("publish", job.root, 7, tmp_path / "again").code == 0
    assert is_whole(job, 7)


@pytest.mark.parametrize("name", [TWO, "config.json", "tokenizer.json"])
def test_a_broken_link_is_refused(shell, job, snapshot, name):
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to("../../blobs/gone")
    refused(shell, job, snapshot, "a broken link")


def test_a_link_to_itself_is_refused(shell, job, snapshot):
    (snapshot / TWO).unlink()
    (snapshot / TWO).symlink_to(TWO)
    refused(shell, job, snapshot, "a broken link")


def test_a_link_to_a_directory_in_place_of_a_shard_is_refused(shell, job, snapshot, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (snapshot / TWO).unlink()
    (snapshot / TWO).symlink_to(tmp_path / "elsewhere")
    refused(shell, job, snapshot, "a directory where a regular file must be")


def test_a_directory_behind_a_link_is_not_copied(shell, job, snapshot, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.json").write_text("{}")
    (snapshot / "original").symlink_to(tmp_path / "elsewhere")
    done = shell("publish", job.root, 7, snapshot)
    assert (done.code, "not copied: original\n" in done.err) == (0, True)
    assert not os.path.lexists(f"{job.step(7)}/actor/original")


def make_socket(path):
    """Bind a socket by its directory's descriptor: the address of one has 108 bytes, a test's path may have more."""
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


@pytest.mark.parametrize("is_linked", [False, True])
def test_pipes_and_sockets_are_refused(shell, job, snapshot, tmp_path, is_linked):
    for make in (os.mkfifo, make_socket):
        place = tmp_path / "special" if is_linked else snapshot / "config.json"
        (snapshot / "config.json").unlink(missing_ok=True)
        place.unlink(missing_ok=True)
        make(str(place))
        if is_linked:
            (snapshot / "config.json").symlink_to(place)
        refused(shell, job, snapshot, "a device, a pipe or a socket where a regular file must be")


def test_a_link_to_an_unreadable_file_is_refused(job, snapshot):
    class Denied(FollowingDisk):
        def read_at(self, path, offset, length):
            if path.endswith("config.json"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().read_at(path, offset, length)

    with pytest.raises(PermissionError):
        publish_directory(job, 7, str(snapshot), outside=Denied())
    assert is_untouched(job)


# --- finite -----------------------------------------------------------------------------------------------------


def poison(path, number, index):
    """Put a number into a shard of F32, at an index of its only tensor."""
    content = bytearray(path.read_bytes())
    place = 8 + int.from_bytes(content[:8], "little") + 4 * index
    content[place : place + 4] = struct.pack("<f", number)
    path.write_bytes(content)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_refused_unless_allowed(shell, job, export, number):
    poison(export / TWO, number, 3)
    done = shell("publish", job.root, 7, export)
    assert done.code == 65
    assert "tensor 'b' holds NaN or infinity, first at flat index 3" in done.err
    assert TWO in done.err
    assert "--allow-nonfinite" in done.err
    assert is_untouched(job)
    assert shell("publish", job.root, 7, export, "--allow-nonfinite").code == 0
    assert is_whole(job, 7)
    assert shell("verify", job.root, 7, "--deep").code == 0


def test_a_refused_export_can_be_published_once_repaired(job, export):
    poison(export / TWO, float("nan"), 0)
    with pytest.raises(NonFiniteError):
        publish_directory(job, 7, str(export))
    assert is_untouched(job)
    poison(export / TWO, 1.0, 0)
    assert publish_directory(job, 7, str(export)).step == 7
    assert is_whole(job, 7)


# --- interrupted, and beside others -----------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
from syncd.protocol.layout import Job
from syncd.publishing import FollowingDisk, publish_export, read_export

class Killing(FollowingDisk):
    def read_at(self, path, offset, length):
        if path.endswith(sys.argv[3]) and length > 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_at(path, offset, length)

disk = Killing()
publish_export(Job.at(sys.argv[1]), 7, disk, read_export(disk, sys.argv[2]))
"""


@pytest.mark.parametrize("name", [ONE, "config.json"])
def test_publishing_again_succeeds_after_a_killed_publish(job, export, name):
    arguments = [sys.executable, "-c", INTERRUPTED, job.root, str(export), name]
    done = subprocess.run(arguments, env=environment(), cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_marker(job.disk, job.marker).step is None
    assert not os.path.exists(f"{job.step(7)}/manifest.json")
    assert publish_directory(job, 7, str(export)).step == 7
    assert is_whole(job, 7)


ENDED = """
import os, sys, time
from syncd.cli.main import run
from syncd.publishing import FollowingDisk, publish_export, read_export

read_at = FollowingDisk.read_at

def slow(self, path, offset, length):
    if path.endswith("config.json") and length > 1 << 20:
        print("copying", flush=True)
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        time.sleep(0.5)  # the main thread has taken the signal then
    return read_at(self, path, offset, length)

FollowingDisk.read_at = slow
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_publish_ended_by_a_signal_leaves_nothing_in_the_job(job, export, tmp_path, number, code):
    sent = tmp_path / "sent"
    arguments = [sys.executable, "-c", ENDED.replace("sys.argv[3]", repr(str(sent)))]
    arguments += ["publish", job.root, "7", str(export)]
    with subprocess.Popen(
        arguments, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "copying\n"
        assert not is_untouched(job)
        process.send_signal(number)
        sent.touch()
        assert process.wait(120) == code
    assert is_untouched(job)


def write_unannounced(job, export):
    """Leave what a call leaves that is killed between its seal and the marker."""
    publish_directory(job, 7, str(export))
    os.unlink(job.marker)


def test_publishing_again_announces_the_step_a_killed_publish_sealed(job, export):
    write_unannounced(job, export)
    sealed = read_manifest(job.disk, job.step(7))
    assert publish_directory(job, 7, str(export)) == sealed
    assert read_marker(job.disk, job.marker).step == 7
    with pytest.raises(AlreadySealedError):
        publish_directory(job, 7, str(export))


def test_another_export_is_refused_under_a_sealed_step(job, export):
    write_unannounced(job, export)
    (export / TWO).write_bytes(shard_bytes({"b": (5,)}, salt=1))
    with pytest.raises(AlreadySealedError):
        publish_directory(job, 7, str(export))
    (export / TWO).write_bytes(shard_bytes({"b": (5,)}))
    (export / "tokenizer.json").write_text("{}")
    with pytest.raises(AlreadySealedError):
        publish_directory(job, 7, str(export))
    assert read_marker(job.disk, job.marker).step is None


class Meanwhile(FollowingDisk):
    """Does something once, when a file is about to be copied."""

    def __init__(self, name, what):
        self._name, self._what = name, what

    def read_at(self, path, offset, length):
        if self._what and path.endswith(self._name) and length > 1 << 20:
            what, self._what = self._what, None
            what()
        return super().read_at(path, offset, length)


def test_a_step_published_concurrently_by_another_process_is_kept(job, export, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(shard_bytes({"w": (7, 7)}))
    disk = Meanwhile("config.json", lambda: publish_directory(job, 7, str(other)))
    with pytest.raises(AlreadySealedError, match="step 7 is complete already by another save") as raised:
        publish_directory(job, 7, str(export), outside=disk)
    assert raised.value.exit_code == 2
    assert raised.value.hint
    assert has_only(job, 7)
    assert [record.name for record in read_manifest(job.disk, job.step(7)).shards] == [
        "actor/model.safetensors"
    ]
    assert is_whole(job, 7)


def test_a_publish_is_refused_if_a_later_step_is_announced_meanwhile(job, export):
    disk = Meanwhile("config.json", lambda: write_step(job, 9))
    with pytest.raises(UsageError, match="below the newest, 9"):
        publish_directory(job, 7, str(export), outside=disk)
    assert read_marker(job.disk, job.marker).step == 9
    assert has_only(job, 9)


def test_the_daemon_removes_what_a_killed_publish_left(job, export):
    arguments = [sys.executable, "-c", INTERRUPTED, job.root, str(export), "config.json"]
    subprocess.run(arguments, env=environment(), cwd=ROOT, timeout=120, check=False)
    assert not is_untouched(job)
    write_step(job, 8)
    daemon, _, clock = start(job, partial_grace=10.0, trash_grace=0.0)
    for _ in range(6):
        daemon.tick(woken=True)
        clock.sleep(60.0)
    daemon.close()
    assert has_only(job, 8)
