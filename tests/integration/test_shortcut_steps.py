"""Steps stored whole with a shortcut: two writers leave one manifest, and no fault of a shortcut harms a step."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from support.cli import Shell
from support.deltas import SHARDS, SmallModel, contents, write_delta, write_keyframe
from support.jobs import explorer, start, steps_of

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.documents import encode, seal
from syncd.protocol.layout import Job
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import decode_manifest, encode_manifest, missing_files, read_manifest
from syncd.protocol.writer import StepWriter
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.chain import Chain
from syncd.transports.delta.materialise import materialise, prove

CONTAINERS = tuple(f"delta/delta-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    job = Job.at(tmp_path / "job")
    disk, model = FollowingDisk(), SmallModel()
    publish_export(job, 1, disk, read_export(disk, model.export(tmp_path / "export1")))
    write_delta(job, 2, model.train().export(tmp_path / "export2"), 1)
    write_keyframe(job, 3, model.train().export(tmp_path / "export3"), 2)
    return job


def rewrite(job, step, change):
    """Change a sealed manifest and seal it again, as nobody may."""
    path = f"{job.step(step)}/manifest.json"
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    document.pop("digest")
    change(document)
    with open(path, "wb") as file:
        file.write(encode(seal(document)))


def flip(path, place=-1):
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def made_by_shortcut(job, step):
    chain = Chain(job, read_chain(job, step, shortcut=True))
    return {
        record.name.removeprefix("actor/"): b"".join(bytes(tile) for _, tile in chain.tiles(record))
        for record in chain.manifest.shards
    }


def test_two_writers_leave_one_delta_and_one_keyframe_whose_shortcut_makes_its_shards(job, tmp_path):
    delta, keyframe = (read_manifest(job.disk, job.step(step)) for step in (2, 3))
    assert (delta.kind, delta.parent, delta.root) == ("delta", 1, None)
    assert (keyframe.kind, keyframe.parent, keyframe.shortcut.parent) == ("weights", None, 2)
    assert keyframe.shortcut.root_before == delta.delta.root_after
    assert [record.name for record in keyframe.containers] == list(CONTAINERS)
    assert encode_manifest(decode_manifest(encode_manifest(keyframe), "/a")) == encode_manifest(keyframe)
    sizes = sum(os.path.getsize(f"{job.step(3)}/{name}") for name in CONTAINERS)
    assert keyframe.size - keyframe.whole_size == sizes
    for step in (2, 3):
        materialise(job, step, str(tmp_path / f"made{step}"))
        assert contents(tmp_path / f"made{step}") == contents(tmp_path / f"export{step}")
    exported = contents(tmp_path / "export3")
    assert made_by_shortcut(job, 3) == {name: exported[name] for name in SHARDS}
    assert prove(job, 3, shortcut=True) == []


def test_all_tiles_of_a_file_are_made_in_the_same_memory(job):
    """Fresh memory for each tile took longer than everything else in a virtual machine."""
    chain = Chain(job, read_chain(job, 3, shortcut=True))
    for record in chain.manifest.shards:
        places = [tile.obj for _, tile in chain.tiles(record)]
        assert len(places) > 1
        assert all(place is places[0] for place in places)


def test_the_daemon_publishes_a_keyframe_and_finds_nothing_wrong_with_its_shortcut(job, shell):
    daemon, recorder, clock = start(job)
    for _ in range(2):
        daemon.tick()
        clock.at += 1
    assert (daemon.snapshot.version.step, daemon.snapshot.version.kind) == (3, "weights")
    assert daemon.snapshot.version.parent is None
    step = daemon.snapshot.steps[3]
    assert step.size == read_manifest(job.disk, job.step(3)).size
    assert (step.shortcut.parent, step.shortcut.problem) == (2, "")
    assert 0 < step.shortcut.density < 0.1
    assert not {"step_damaged", "shortcut_rejected"} & set(recorder.names())
    verified = shell("verify", job.root, 3, "--deep")
    assert verified.code == 0, verified.err
    assert "its changes make every byte" in verified.out


def test_views_show_the_shortcut_and_retention_keeps_what_an_explorer_catches_up_by(job, shell, tmp_path):
    daemon, recorder, clock = start(job, keep_last=1)
    model, before = SmallModel(), 3
    for step in (4, 5):
        model.train()
        write_keyframe(job, step, model.export(tmp_path / f"export{step}"), before)
        before = step
    follows = explorer(job, clock, "e0", applied=(1, 2), reads=("delta",))
    for _ in range(3):
        daemon.tick()
        clock.at += 10
        follows.update()
    rows = {row["step"]: row for row in shell("ls", job.root, "--keep-last", 1, "--json").document["steps"]}
    assert {step: row["rule"] for step, row in rows.items()} == {
        3: "catch_up", 4: "catch_up", 5: "newest_version"
    }  # fmt: skip
    assert rows[4]["shortcut"]["parent"] == 3
    assert rows[4]["shortcut"]["problem"] == ""
    assert rows[4]["delta"] is None
    assert "e0 reaches step 5 by" in shell("prune", job.root, "--dry-run", "--keep-last", 1).out
    assert "shortcut from 3, " in shell("ls", job.root).out
    assert "shortcut from 4, " in shell("status", job.root).out
    published = recorder.of("version_published")[-1]
    assert (published["parent"], published["chain"]) == (4, 0)
    manifest = read_manifest(job.disk, job.step(5))
    assert published["changes_bytes"] == manifest.size - manifest.whole_size
    assert published["whole_bytes"] == manifest.whole_size
    follows.update(applied=(1, 5))
    for _ in range(3):
        daemon.tick()
        clock.at += 10
        follows.update()
    assert steps_of(job) == [5]


def lose(job):
    os.remove(f"{job.step(3)}/{CONTAINERS[1]}")


def cut(job):
    os.truncate(f"{job.step(3)}/{CONTAINERS[0]}", 100)


def damage_table(job):
    flip(f"{job.step(3)}/{CONTAINERS[0]}", 300 - os.path.getsize(f"{job.step(3)}/{CONTAINERS[0]}"))


def set_field(**fields):
    return lambda job: rewrite(job, 3, lambda document: document["shortcut"].update(fields))


FAULTS = {
    "a lost container": lose,
    "a container cut short": cut,
    "a damaged table": damage_table,
    "no such folder": lambda job: shutil.rmtree(f"{job.step(3)}/delta"),
    "another root before": set_field(root_before="xxh3_128:" + "0" * 32),
    "another count": set_field(changed=1),
    "more changes than words": set_field(changed=10**9),
    "an unknown encoding": set_field(encoding="ulp9"),
    "a later parent": set_field(parent=7),
    "no container": set_field(containers=[]),
    "a field of another type": set_field(parent="2"),
    "a container outside": lambda job: rewrite(
        job, 3, lambda found: found["shortcut"]["containers"][0].update(name="actor/x")
    ),
    "no object": lambda job: rewrite(job, 3, lambda document: document.update(shortcut=[1])),
    "no root": lambda job: rewrite(job, 3, lambda document: document.pop("root")),
    "a parent that was written again": lambda job: rewrite(
        job, 2, lambda document: document.update(written_at=1.0)
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_shortcut_that_nobody_can_use_is_said_once_and_the_step_stays_whole(name, job, shell, tmp_path):
    FAULTS[name](job)
    daemon, recorder, clock = start(job)
    for _ in range(4):
        daemon.tick()
        clock.at += 100
    assert daemon.snapshot.version.step == 3
    assert daemon.snapshot.steps[3].shortcut.problem
    assert [event["step"] for event in recorder.of("shortcut_rejected")] == [3]
    assert "step_damaged" not in recorder.names()
    verified = shell("verify", job.root, 3)
    assert verified.code == 65
    assert "is complete, but its shortcut cannot be used" in verified.err
    manifest = read_manifest(job.disk, job.step(3))
    assert missing_files(job.disk, job.step(3), manifest) == []
    materialise(job, 3, str(tmp_path / "made"))
    assert contents(tmp_path / "made") == contents(tmp_path / "export3")


def test_verify_deep_finds_damage_in_a_stream_that_tables_do_not_show(job, shell):
    flip(f"{job.step(3)}/{CONTAINERS[1]}")
    assert shell("verify", job.root, 3).code == 0
    found = shell("verify", job.root, 3, "--deep", "--json")
    assert found.code == 65
    assert found.document["ok"]
    assert CONTAINERS[1] in found.document["shortcut"]["problems"][0]


def test_a_parent_that_is_gone_is_no_fault_of_a_shortcut(job, shell):
    shutil.rmtree(job.step(2))
    daemon, recorder, _ = start(job)
    daemon.tick()
    daemon.tick()
    assert daemon.snapshot.version.step == 3
    assert "shortcut_rejected" not in recorder.names()
    found = shell("verify", job.root, 3, "--deep")
    assert found.code == 0
    assert "not applied: step 2 is no longer there" in found.out


def test_a_reader_that_knows_no_shortcut_reads_the_step(job):
    """Releases before shortcuts take the fields that they know from a manifest, and check all of it by its digest."""
    manifest = read_manifest(job.disk, job.step(3))
    with open(f"{job.step(3)}/manifest.json", "rb") as file:
        document = json.load(file)
    document.pop("digest")
    document["field_of_a_later_release"] = document.pop("shortcut")
    before = decode_manifest(encode(seal(document)), "/a")
    assert replace(before, digest="") == replace(manifest, shortcut=None, digest="")
    assert missing_files(job.disk, job.step(3), before) == []


def test_parts_of_writers_that_do_not_fit_each_other_are_never_sealed(job, tmp_path):
    manifest = read_manifest(job.disk, job.step(3))
    parts = [one.changes for one in receipts(job, 3)]
    assert [part.parent for part in parts] == [2, 2]
    for changed in (
        [parts[0], None],
        [parts[0], replace(parts[1], parent=1)],
        [parts[0], replace(parts[1], shards=manifest.shards)],
        [replace(part, containers=()) for part in parts],
    ):
        writer = StepWriter(job, 4, 2, f"save{id(changed)}")
        writer.begin()
        for number, part in enumerate(changed, 1):
            shard = writer.write(manifest.shards[number - 1].name, b"x", 1)
            writer.receipt(number, [shard], changes=part)
        with pytest.raises(CorruptDataError, match=r"writers|neither"):
            writer.seal()


def test_a_step_whose_shortcut_contradicts_it_is_never_sealed(job, tmp_path):
    with pytest.raises(UsageError, match="more than there is"):
        write_keyframe(job, 4, str(tmp_path / "export3"), 3, changed=10**9)


def receipts(job, step):
    from syncd.protocol.receipt import read_receipts

    return read_receipts(job.disk, job.step(step))
