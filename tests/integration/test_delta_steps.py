"""Steps stored as deltas: published, proved by the daemon, kept as chains, and materialised byte for byte."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from pathlib import Path
from random import Random

import pytest
from support.cli import Shell, command, environment, modules_loaded
from support.deltas import SHARDS, SmallModel, contents
from support.jobs import start, steps_of, write_step

from syncd.client.client import Client
from syncd.errors import RefusedError, SyncdError, TryAgainError
from syncd.extras import install_command
from syncd.protocol.documents import encode, seal
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import RunningStatus, read_presences
from syncd.protocol.version import read_version_or_none
from syncd.protocol.writer import StepWriter
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.synchronizer import Synchronizer
from syncd.transports.delta.materialise import materialise
from syncd.transports.delta.publish import publish_delta
from syncd.transports.files.leased_directory import DirectoryOptions
from syncd.transports.files.receive import FilesReceiver
from syncd.transports.files.stage import HostStage

CONTAINER = "actor/delta-00001-of-00001.safetensors"


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@pytest.fixture
def model():
    return SmallModel()


@pytest.fixture
def publish(job, shell, model, tmp_path):
    """Return a function that publishes the model as a step, of a parent or whole; returns what was published."""

    def published(step, parent=None, *more):
        export = model.export(tmp_path / f"export{step}")
        given = () if parent is None else ("--delta-from", parent)
        result = shell("publish", job.root, step, export, *given, "--json", *more)
        assert result.code == 0, result.err
        return result.document

    return published


@pytest.fixture
def chain(publish, model):
    """Publish step 1 whole and steps 2 to 4 as deltas, the last with another tokenizer."""
    publish(1)
    for step in (2, 3):
        model.train()
        publish(step, step - 1)
    model.train().tokenizer = '{"new": 1}'
    return publish(4, 3)


def rewrite(job, step, **changes):
    """Change fields of a sealed manifest, and seal it again, as nobody may."""
    path = f"{job.step(step)}/manifest.json"
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    document.pop("digest")
    delta = document.get("delta") or {}
    document["delta"] = {**delta, **changes.pop("delta", {})} or None
    with open(path, "wb") as file:
        file.write(encode(seal({**document, **changes})))


def flip(path, place=-1):
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_each_step_of_a_chain_materialises_as_what_was_exported(chain, job, shell, tmp_path):
    assert chain["kind"] == "delta"
    assert chain["bytes"] * 1.5 < chain["whole_bytes"]
    assert chain["why_whole"] == ""
    for step in (1, 2, 3, 4):
        done = shell("materialise", job.root, step, "--to", tmp_path / f"made{step}")
        assert done.code == 0, done.err
        assert contents(tmp_path / f"made{step}") == contents(tmp_path / f"export{step}")
    assert set(contents(job.step(3))) == {
        "manifest.json", CONTAINER, "actor/.receipts/00001-of-00001.json"
    }  # fmt: skip
    assert "actor/tokenizer.json" in contents(job.step(4))


def test_an_unchanged_export_is_a_delta_that_changes_nothing(publish, job, shell, tmp_path):
    publish(1)
    assert publish(2, 1)["kind"] == "delta"
    assert read_manifest(job.disk, job.step(2)).delta.changed == 0
    assert shell("materialise", job.root, 2, "--to", tmp_path / "made").code == 0
    assert contents(tmp_path / "made") == contents(tmp_path / "export2")


def test_the_daemon_publishes_a_delta_whose_lineage_it_has_proved(chain, job):
    daemon, recorder, _ = start(job)
    daemon.tick()
    assert (daemon.snapshot.version.step, daemon.snapshot.version.kind) == (4, "delta")
    assert daemon.snapshot.version.parent == 3
    assert "step_damaged" not in recorder.names()


BREAKS = {
    "a parent that was written again": lambda job: rewrite(job, 3, written_at=1.0),
    "a parent that is gone": lambda job: shutil.rmtree(job.step(3)),
    "a keyframe that is gone": lambda job: shutil.rmtree(job.step(1)),
    "a keyframe without a file": lambda job: os.unlink(f"{job.step(1)}/actor/{SHARDS[0]}"),
    "another root before": lambda job: rewrite(job, 4, delta={"root_before": "xxh3_128:00"}),
    "another root after": lambda job: rewrite(job, 4, delta={"root_after": "xxh3_128:00"}),
    "no roots": lambda job: rewrite(job, 4, delta={"root_before": "", "root_after": ""}),
    "another count": lambda job: rewrite(job, 4, delta={"changed": 1}),
    "a lost target": lambda job: rewrite(job, 4, delta={"shards": []}),
    "a file that no link has": lambda job: rewrite(
        job, 4, delta={"files": [{"name": "actor/x", "size": 1, "digest": "xxh3_128:00", "tensors": 0}]}
    ),
    "an unknown encoding": lambda job: rewrite(job, 4, delta={"encoding": "ulp9"}),
    "a digest in the table": lambda job: flip(f"{job.step(4)}/{CONTAINER}", 4096 + 250),
}


@pytest.mark.fault("a pruned chain is replayed on the wrong base")
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_chain_is_never_published_nor_materialised(name, chain, job, shell, tmp_path):
    BREAKS[name](job)
    daemon, _, _ = start(job)
    daemon.tick()
    version = daemon.snapshot.version
    assert version is None or version.step < 4
    ended = shell("materialise", job.root, 4, "--to", tmp_path / "made")
    assert ended.code == 65, ended.err
    assert "Traceback" not in ended.err
    assert not [name for name in os.listdir(tmp_path) if "made" in name]
    assert shell("verify", job.root, 4, "--deep").code in (2, 65)


@pytest.mark.parametrize("link", [1, 2])
def test_a_link_in_place_of_a_step_proves_no_delta(link, chain, job, shell, tmp_path):
    shutil.move(job.step(link), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", job.step(link))
    assert shell("verify", job.root, 3).code == 65
    assert shell("verify", job.root, 3, "--deep").code == 65
    assert shell("materialise", job.root, 3, "--to", tmp_path / "whole").code == 65
    assert shell("materialise", job.root, link, "--to", tmp_path / "whole").code == 2
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    version = read_version_or_none(job)
    assert version is None or version.step < link
    with Client.open(job.root, "explorer", "e") as client, pytest.raises(SyncdError), client.lease(link):
        pass


def test_verify_deep_proves_a_chain_and_finds_damage_that_headers_do_not_show(chain, job, shell):
    proved = shell("verify", job.root, 4, "--deep")
    assert proved.code == 0, proved.err
    assert "every byte that its chain makes matches its digest" in proved.out
    flip(f"{job.step(1)}/actor/{SHARDS[1]}")  # the keyframe's last byte: its header is whole
    assert shell("verify", job.root, 4).code == 0
    found = shell("verify", job.root, 4, "--deep")
    assert found.code == 65
    assert SHARDS[1] in found.out
    flip(f"{job.step(1)}/actor/{SHARDS[1]}")
    assert shell("verify", job.root, 4, "--deep").code == 0
    flip(f"{job.step(2)}/{CONTAINER}")  # a stream of a link
    assert shell("verify", job.root, 4, "--deep").code == 65


@pytest.mark.fault("a delta is applied to a base that it was not made from")
def test_damage_in_any_link_is_never_materialised(chain, job, shell, tmp_path):
    places = [
        f"{job.step(2)}/{CONTAINER}",
        f"{job.step(1)}/actor/{SHARDS[0]}",
        f"{job.step(4)}/actor/tokenizer.json",
    ]
    for path in places:
        flip(path)
        assert shell("materialise", job.root, 4, "--to", tmp_path / "made").code == 65
        assert not (tmp_path / "made").exists()
        flip(path)
    assert shell("materialise", job.root, 4, "--to", tmp_path / "made").code == 0


def test_retention_keeps_a_chain_as_long_as_its_newest_delta(publish, model, job, shell, tmp_path):
    publish(1)
    for step in (2, 3, 4, 5):
        model.train()
        publish(step, step - 1)
    daemon, _, clock = start(job, keep_last=1)
    for _ in range(3):
        daemon.tick()
        clock.at += 100
    assert steps_of(job) == [1, 2, 3, 4, 5]
    rows = {row["step"]: row for row in shell("ls", job.root, "--keep-last", 1, "--json").document["steps"]}
    assert {step: rows[step]["rule"] for step in (1, 2, 3, 4)} == dict.fromkeys((1, 2, 3, 4), "chain")
    assert rows[5]["delta"]["chain"] == 4
    assert rows[1]["delta"] is None
    assert rows[5]["delta"]["whole_bytes"] > rows[5]["delta"]["bytes"] == rows[5]["bytes"]
    assert 0 < rows[5]["delta"]["density"] < 0.05
    assert "delta of 4" in shell("ls", job.root).out
    for step, kept in ((6, [1, 2, 3, 4, 5, 6]), (7, [6, 7])):  # 5 is the previous version until 7
        publish(step)
        for _ in range(3):
            daemon.tick()
            clock.at += 100
        assert steps_of(job) == kept


def test_status_shows_the_published_delta(chain, job, shell):
    daemon, _, _ = start(job)
    daemon.tick()
    version = shell("status", job.root, "--json").document["version"]
    assert version["kind"] == "delta"
    assert (version["delta"]["parent"], version["delta"]["chain"]) == (3, 3)
    assert "delta of 3" in shell("status", job.root).out


REASONS = {
    "a tensor of another shape": ("b", lambda tensor: tensor[:-1], "the header of"),
    "a tensor of another dtype": ("b", lambda tensor: tensor.astype("float32"), "the header of"),
    "most weights changed": ("b", lambda tensor: (tensor * 1.7 + 0.3).astype("float16"), "more than 25%"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_step_is_whole_where_a_delta_does_not_fit_or_pay_and_says_why(name, publish, model, job):
    tensor, change, why = REASONS[name]
    publish(1)
    model.shards[SHARDS[1]][tensor] = change(model.shards[SHARDS[1]][tensor])
    published = publish(2, 1)
    assert published["kind"] == "weights"
    assert why in published["why_whole"]
    assert set(os.listdir(job.root)) - {".syncd"} == {
        "global_step_1",
        "global_step_2",
        "latest_state_dict_iteration.txt",
    }


def test_another_number_of_shards_is_a_whole_step(publish, model):
    publish(1)
    model.shards[SHARDS[0].replace("00001-of", "00003-of")] = {}
    renamed = {
        f"model-{number + 1:05d}-of-00003.safetensors": one
        for number, one in enumerate(model.shards.values())
    }
    model.shards = {**renamed, "model-00003-of-00003.safetensors": {"c": model.shards[SHARDS[0]]["norm"]}}
    published = publish(2, 1)
    assert published["kind"] == "weights"
    assert "its shard files are not those of step 1" in published["why_whole"]


def test_a_long_chain_ends_with_a_whole_step(publish, model, monkeypatch):
    monkeypatch.setattr("syncd.transports.delta.publish.KEYFRAME_EVERY", 2)
    publish(1)
    kinds = [publish(step, step - 1)["kind"] for step in range(2, 6)]
    assert kinds == ["delta", "delta", "weights", "delta"]


def test_a_parent_that_the_trainer_wrote_without_a_root_is_compared_byte_by_byte(job, shell, tmp_path):
    write_step(job, 1)
    export = tmp_path / "export"
    shutil.copytree(f"{job.step(1)}/actor", export, ignore=shutil.ignore_patterns(".*"))
    shard = export / "model-00001-of-00001.safetensors"
    flip(shard)
    published = shell("publish", job.root, 2, export, "--delta-from", 1, "--json")
    assert published.document["kind"] == "delta"
    assert read_manifest(job.disk, job.step(1)).root is None
    assert shell("materialise", job.root, 2, "--to", tmp_path / "made").code == 0
    assert contents(tmp_path / "made") == contents(export)
    flip(f"{job.step(1)}/actor/model-00001-of-00001.safetensors", 200)
    damaged = shell("publish", job.root, 3, export, "--delta-from", 1)
    assert (damaged.code, steps_of(job)) == (65, [1, 2])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--delta-from", 9), 2, "there is no step 9"),
        (("--delta-from", 5), 2, "not earlier than step 5"),
        (("--delta-from", 7), 2, "not earlier"),
    ],
)
def test_a_parent_that_cannot_be_one_is_refused(arguments, code, text, publish, model, job, shell, tmp_path):
    publish(1)
    step = 10 if arguments[1] == 9 else 5
    ended = shell("publish", job.root, step, model.export(tmp_path / "more"), *arguments)
    assert (ended.code, steps_of(job)) == (code, [1])
    assert text in ended.err


@pytest.mark.parametrize("more", [(), ("--delta-from", 1), ("--rewind",)])
@pytest.mark.parametrize("way", ["itself", "link", "copy", "beside_a_model", "step"])
def test_a_delta_is_not_published_as_a_model(way, more, chain, model, job, shell, tmp_path):
    delta, source = f"{job.step(3)}/actor", tmp_path / "source"
    if way == "link":
        source.symlink_to(delta)
    elif way == "copy":
        shutil.copytree(delta, source)
    elif way == "beside_a_model":
        source = model.export(source)
        shutil.copy(next(Path(delta).glob("delta-*")), source)
    ended = shell("publish", job.root, 9, {"itself": delta, "step": job.step(3)}.get(way, source), *more)
    assert ended.code == (2 if way == "step" else 65)
    assert steps_of(job) == [1, 2, 3, 4]
    if way in ("itself", "link"):
        command = ended.err.partition("syncd materialise ")[2].split()
        assert shell("materialise", *command[:3], tmp_path / "whole").code == 0
        assert shell("publish", job.root, 9, tmp_path / "whole").code == 0


def test_a_delta_that_others_sealed_or_laid_out_as_a_model_is_never_published(chain, job, shell):
    container = next(Path(job.step(3), "actor").glob("delta-*")).read_bytes()
    writer = StepWriter(job, 9, 1, "by-hand")
    writer.begin()
    writer.receipt(1, [writer.write("actor/model.safetensors", container, tensors=3)])
    writer.seal()
    assert shell("verify", job.root, 9, "--deep").code == 65
    foreign = Path(job.root, "global_step_10", "actor")
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_bytes(container)
    (foreign / "config.json").write_text("{}")
    Path(job.marker).write_text("10")
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    version = read_version_or_none(job)
    assert version is None or version.step <= 4
    assert shell("verify", job.root, 10).code == 65


def test_materialise_refuses_what_it_cannot_write_or_read(chain, job, shell, tmp_path):
    taken, empty = tmp_path / "taken", tmp_path / "empty"
    taken.mkdir()
    (taken / "x").write_text("")
    empty.mkdir()
    for step, target, code in (
        (4, taken, 2), (4, f"{job.root}/inside", 2), (4, tmp_path / "no/parent", 2), (9, tmp_path / "made", 2),
        (4, empty, 0),
    ):  # fmt: skip
        ended = shell("materialise", job.root, step, "--to", target)
        assert ended.code == code, ended.err
        assert "Traceback" not in ended.err
    assert contents(empty) == contents(tmp_path / "export4")
    assert os.listdir(taken) == ["x"]


@pytest.mark.parametrize("verb", ["publish", "materialise"])
def test_a_link_that_is_removed_while_it_is_read_ends_with_try_again(verb, publish, model, job, tmp_path):
    publish(1)
    model.train()
    publish(2, 1)
    export = read_export(FollowingDisk(), model.train().export(tmp_path / "next"))
    before = contents(job.root)

    class Removing(FollowingDisk):
        """The daemon removes the keyframe once the first shard is under way."""

        def read_at(self, path, offset, length):
            remove()
            return super().read_at(path, offset, length)

        def replace(self, path, data, **more):
            super().replace(path, data, **more)
            remove()

    def remove():
        shutil.rmtree(job.step(1), ignore_errors=True)

    call = {
        "publish": lambda: publish_delta(job, 3, Removing(), export, 2),
        "materialise": lambda: materialise(job, 2, str(tmp_path / "made"), Removing()),
    }[verb]
    with pytest.raises(TryAgainError, match="a step of the chain of step 2 was removed") as ended:
        call()
    assert f"syncd pin {job.root} 2" in ended.value.hint
    assert contents(job.root) == {name: data for name, data in before.items() if "step_1/" not in name}
    assert not [name for name in os.listdir(tmp_path) if "made" in name]


def test_the_parent_stays_while_its_changes_are_encoded(publish, model, job, tmp_path):
    """Two steps are published meanwhile, after which nothing else keeps the parent."""
    publish(1)
    daemon, recorder, clock = start(job, keep_last=1)
    daemon.tick()
    export = read_export(FollowingDisk(), model.train().export(tmp_path / "next"))
    readers = []

    class Overtaken(FollowingDisk):
        def read_at(self, path, offset, length):
            if not readers:
                readers.extend(read_presences(job.disk, job.explorers)[0].values())
                overtake()
            return super().read_at(path, offset, length)

    def overtake():
        for step in (2, 3):
            publish(step)
            clock.at += 10
            for _ in range(2):
                daemon.tick(woken=True)
            assert daemon.snapshot.version.step == step
        assert not daemon.is_left

    assert publish_delta(job, 4, Overtaken(), export, 1).manifest.delta.parent == 1
    assert [(one.status, one.leases) for one in readers] == [(RunningStatus.STOPPED, (1,))]
    assert read_presences(job.disk, job.explorers)[0] == {}
    daemon.tick(woken=True)
    assert (daemon.snapshot.version.step, daemon.snapshot.version.parent) == (4, 1)
    assert not {"explorer_joined", "explorer_left", "explorer_died"} & set(recorder.names())
    materialise(job, 4, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "next")


def test_a_step_is_whole_where_its_parent_cannot_be_leased(publish, model, job):
    publish(1)
    os.makedirs(os.path.dirname(job.explorers), exist_ok=True)
    with open(job.explorers, "w", encoding="utf-8"):
        model.train()
    assert publish(2, 1)["why_whole"].startswith("the lease on step 1 cannot be written: ")


class Failing(LocalDisk):
    """A disk on which one call fails.

    Args:
        left: How many calls succeed first.
        number: The error's number.
    """

    def __init__(self, left, number):
        super().__init__()
        self.left, self.number = left, number

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in {"read", "read_at", "list", "replace", "rename", "make_directory", "sync_directory"}:
            return found

        def call(path, *given, **more):
            self.left -= 1
            if self.left == -1:
                raise OSError(self.number, os.strerror(self.number), path)
            return found(path, *given, **more)

        return call


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("verb", ["publish", "materialise"])
def test_an_error_at_each_call_leaves_nothing_half(verb, number, publish, model, job, tmp_path):
    """Calls of the job's disk, and of the target's. An attempt that could not be removed is left to the daemon."""
    publish(1)
    model.train()
    publish(2, 1)
    export = read_export(FollowingDisk(), model.train().export(tmp_path / "next"))
    expected = contents(tmp_path / ("next" if verb == "publish" else "export2"))
    ended = 0
    for left in range(1000):
        disk = Failing(left, number)
        failing = Job.at(job.root, disk=disk)
        try:
            if verb == "publish":
                publish_delta(failing, 3, FollowingDisk(), export, 2)
            else:
                materialise(failing, 2, str(tmp_path / "made"), disk)
        except (OSError, SyncdError):
            ended += 1
        if disk.left >= 0:
            break
        if os.path.exists(job.step(3)):
            materialise(job, 3, str(tmp_path / "made"))
        if (tmp_path / "made").exists():
            assert contents(tmp_path / "made") == expected
            shutil.rmtree(tmp_path / "made")
        assert not [name for name in os.listdir(tmp_path) if "made" in name]
        shutil.rmtree(job.step(3), ignore_errors=True)
        with open(job.marker, "w", encoding="utf-8") as file:
            file.write("2\n")
    assert ended > 15
    assert disk.left >= 0


def test_a_delta_that_is_not_finite_is_refused_unless_that_is_allowed(publish, model, job, shell, tmp_path):
    publish(1)
    model.shards[SHARDS[1]]["b"][17] = float("nan")
    export = model.export(tmp_path / "nan")
    refused = shell("publish", job.root, 2, export, "--delta-from", 1)
    assert (refused.code, steps_of(job)) == (65, [1])
    assert "flat index 17" in refused.err
    assert shell("publish", job.root, 2, export, "--delta-from", 1, "--allow-nonfinite").code == 0
    assert shell("materialise", job.root, 2, "--to", tmp_path / "made").code == 0
    assert contents(tmp_path / "made") == contents(export)


def test_a_sealed_delta_is_announced_by_the_same_call(publish, model, job, shell, tmp_path):
    publish(1)
    model.train()
    publish(2, 1)
    os.unlink(job.marker)
    again = shell("publish", job.root, 2, tmp_path / "export2", "--delta-from", 1, "--json")
    assert (again.code, again.document["kind"]) == (0, "delta")
    with open(job.marker, encoding="utf-8") as file:
        assert file.read().strip() == "2"
    assert shell("publish", job.root, 2, tmp_path / "export1", "--delta-from", 1).code == 2


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A TMPDIR of the test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_reader_without_a_stage_makes_a_delta_whole_below_tmpdir(chain, job, temporary, tmp_path, model):
    daemon, _, _ = start(job)
    daemon.tick()
    expected = contents(tmp_path / "export4")
    with Client.open(job.root, "explorer", "e0") as client:
        receiver = FilesReceiver(client)
        received = receiver.receive(daemon.snapshot.version, 1.0)
        assert (received.version.kind, contents(received.path)) == ("weights", expected)
        assert received.path.startswith(f"{temporary}/")
        assert receiver.reads() == ()  # it costs a whole read
        receiver.close()
    assert contents(temporary) == {}
    with Synchronizer.open(job.root) as reader:
        state, step = reader.get_model_state_dict()
        assert step == 4
        tensors = {name: tensor for shard in model.shards.values() for name, tensor in shard.items()}
        assert {name: bytes(one.data) for name, one in state.items()} == {
            name: tensor.tobytes() for name, tensor in tensors.items()
        }
        assert dict(reader.get_model_state_dict_iterator()).keys() == tensors.keys()
        assert {name for name, *_ in reader.get_state_dict_meta()} == tensors.keys()
        path = reader.get_latest_model_path()
        assert contents(path) == expected
        assert reader.get_latest_model_path() == path
    assert contents(temporary) == {}


def test_a_delta_is_refused_where_there_is_no_room_below_tmpdir(chain, job, temporary, monkeypatch):
    daemon, _, _ = start(job)
    daemon.tick()
    monkeypatch.setattr("syncd.transports.files.stage.LocalDisk.free", lambda *_: 0)
    with Client.open(job.root, "explorer", "e0") as client:
        receiver = FilesReceiver(client)
        with pytest.raises(RefusedError, match="do not fit, 0 are free") as refused:
            receiver.receive(daemon.snapshot.version, 1.0)
        assert "--stage" in refused.value.hint
        assert f"syncd materialise {job.root} 4 --to DIR" in refused.value.hint
    temporary_stage = next(temporary.iterdir())
    temporary_stage.chmod(0o777)
    with (
        Client.open(job.root, "explorer", "e0") as client,
        pytest.raises(RefusedError, match="others may use"),
    ):
        FilesReceiver(client).receive(daemon.snapshot.version, 1.0)
    temporary_stage.chmod(0o700)


def test_what_a_killed_reader_left_below_tmpdir_is_removed_by_the_next_start(chain, job, temporary):
    daemon, _, _ = start(job)
    daemon.tick()

    def read_and_die():
        with Client.open(job.root, "explorer", "killed", heartbeat=False) as client:
            FilesReceiver(client).receive(daemon.snapshot.version, 1.0)
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=read_and_die)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert contents(temporary) != {}
    with Client.open(job.root, "explorer", "e0") as client:
        FilesReceiver(client)
        assert contents(temporary) == {}


def test_a_follower_whose_stage_could_read_deltas_warns_once_without_the_packages(job, tmp_path, monkeypatch):
    heard = []
    options = DirectoryOptions(report=lambda *event, **fields: heard.append((*event, fields)))
    found = "syncd.extras.find_spec"
    monkeypatch.setattr(found, lambda name: None if name == "pyarrow" else name)
    with Client.open(job.root, "explorer", "e0") as client:
        stage = HostStage(str(tmp_path / "stage"), job.root)
        for receiver in (FilesReceiver(client, options), FilesReceiver(client, options, stage)):
            assert [receiver.reads(), receiver.reads()] == [(), ()]
            receiver.close()
        reason = {"reason": "not installed: pyarrow", "hint": install_command("delta")}
        assert heard == [("warning", "deltas_disabled", reason)], "without a stage none are read anyway"
        monkeypatch.undo()
        assert FilesReceiver(client, options, stage).reads() == ("delta",)


def test_only_the_commands_that_need_it_load_the_codec(chain, job, tmp_path):
    heavy = {"numpy", "pyarrow", "torch"}
    for arguments in (("ls", job.root), ("verify", job.root, 4), ("verify", job.root, 1, "--deep")):
        assert heavy & set(modules_loaded(*arguments)) == set()
    loaded = set(modules_loaded("materialise", job.root, 4, "--to", tmp_path / "made"))
    assert {"numpy", "pyarrow"} <= loaded
    assert "torch" not in loaded


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["publish", "materialise"])
def test_a_command_that_is_killed_at_any_time_leaves_nothing_half(verb, publish, model, job, tmp_path):
    """SIGKILL at ten instants: nothing is announced, no directory appears, and the same call then succeeds."""
    publish(1)
    model.train()
    publish(2, 1)
    export = model.train().export(tmp_path / "next")
    given = {
        "publish": ("publish", job.root, 3, export, "--delta-from", 2),
        "materialise": ("materialise", job.root, 2, "--to", tmp_path / "made"),
    }[verb]
    for number in range(10):
        process = subprocess.Popen(command(*given), env=environment(), stdout=-3, stderr=-3)
        try:
            process.wait(0.2 + 0.1 * number)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if verb == "materialise" and (tmp_path / "made").exists():
            assert contents(tmp_path / "made") == contents(tmp_path / "export2")
            shutil.rmtree(tmp_path / "made")
        elif verb == "publish":
            whole = os.path.exists(f"{job.step(3)}/manifest.json")
            assert whole or not os.path.exists(job.step(3))
            with open(job.marker, encoding="utf-8") as file:
                assert file.read().strip() == "2" or whole
            shutil.rmtree(job.step(3), ignore_errors=True)
            with open(job.marker, "w", encoding="utf-8") as file:
                file.write("2\n")
    assert subprocess.run(command(*given), env=environment(), check=False).returncode == 0


@pytest.mark.slow
def test_thirty_versions_from_random_parents_stay_bit_for_bit_while_retention_prunes(model, job, tmp_path):
    """Sparse, dense and changed layouts; parents at random among what is there; each step that is left is whole."""
    random, exports, kinds = Random(7), dict[int, dict[str, bytes]](), list[str]()
    daemon, recorder, clock = start(job, keep_last=3)
    for step in range(1, 31):
        if step % 11 == 0:
            model.shards[SHARDS[1]][f"more{step}"] = model.shards[SHARDS[0]]["norm"]
        export = model.train(random.choice((0, 0.001, 0.02, 0.2))).export(tmp_path / f"export{step}")
        disk, there = FollowingDisk(), steps_of(job)
        found = read_export(disk, export)
        if there:
            parent = random.choice(there[-3:])
            kinds.append(publish_delta(job, step, disk, found, parent).manifest.kind)
        else:
            publish_export(job, step, disk, found)
        exports[step] = contents(export)
        for _ in range(2):
            daemon.tick()
            clock.at += 100
        assert daemon.snapshot.version.step == step
    assert kinds.count("delta") > 10
    assert kinds.count("weights") >= 2
    assert "step_damaged" not in recorder.names()
    assert len(steps_of(job)) < 30
    for step in steps_of(job):
        materialise(job, step, str(tmp_path / f"made{step}"))
        assert contents(tmp_path / f"made{step}") == exports[step]
