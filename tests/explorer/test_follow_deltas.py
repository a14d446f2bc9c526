"""Followers read deltas: made whole in the stage, from the nearest copy, whatever is killed, damaged or lost."""

import errno
import multiprocessing
import os
import shutil
import signal
from pkgutil import resolve_name

import numpy as np
import pytest
from support.deltas import SHARDS, SmallModel, contents, write_delta, write_keyframe
from support.fake_hook import FakeEngine, FakeHook, digest_of
from support.followers import Scene

import syncd.transports.files.copy_files
from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.versions import Fetcher
from syncd.client.client import Client
from syncd.errors import RefusedError, SyncdError
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.publish import publish_delta
from syncd.transports.files.leased_directory import LoadTimings
from syncd.transports.files.stage import StageFullError

CONTAINER = "actor/delta-00001-of-00001.safetensors"

HEADER = 64 << 10
"""The bytes of a file that are read for its header, and may be read again."""


class CountingDisk(LocalDisk):
    """Counts what is read of weights, by step."""

    def __init__(self):
        super().__init__()
        self.bytes, self.opened = {}, []

    def read_at(self, path, offset, length):
        data = super().read_at(path, offset, length)
        self.opened.append(path)
        if path.endswith(".safetensors"):
            step = path.partition("global_step_")[2].partition("/")[0]
            self.bytes[step] = self.bytes.get(step, 0) + len(data)
        return data

    def steps(self):
        found, self.bytes = {int(step) for step in self.bytes if step}, {}
        return found


class DeltaScene(Scene):
    """A job whose steps are deltas of one model."""

    def __init__(self, root):
        super().__init__(root, keep_last=20)
        self.model, self.place = SmallModel(), root.parent

    def whole(self, step):
        export = read_export(FollowingDisk(), self.model.export(self.place / f"export{step}"))
        publish_export(self.job, step, FollowingDisk(), export)
        self.tick()

    def delta(self, step, parent=None):
        export = read_export(FollowingDisk(), self.model.train().export(self.place / f"export{step}"))
        made = publish_delta(self.job, step, FollowingDisk(), export, parent or step - 1)
        assert made.why_whole == ""
        self.tick()

    def written(self, step, write, share=0.02):
        """Publish the model, trained on, as a trainer of two ranks writes a delta or a keyframe with a shortcut."""
        export = self.model.train(share).export(self.place / f"export{step}")
        write(self.job, step, export, step - 1)
        self.tick()

    def chain(self, last):
        self.whole(1)
        for step in range(2, last + 1):
            self.delta(step)

    def fetcher(self, disk=None, name="e9", stage="stage", report=lambda *_, **__: None):
        """Return what fetches versions for one hook, on a disk of the test's."""
        client = self._stack.enter_context(
            Client.open(self.root, "explorer", name, disk=disk, poll=0.005, heartbeat=False)
        )
        options = FollowOptions(stage=str(self.place / stage))
        return client, Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, report)

    def fetch(self, fetcher, step):
        held = fetcher.fetch(step, LoadTimings(SystemClock()))
        assert contents(held.directory.path) == contents(self.place / f"export{step}")
        return held


@pytest.fixture
def scene(tmp_path):
    scene = DeltaScene(tmp_path / "job")
    yield scene
    scene.close()


def applied(follower, step):
    outcome = follower.turn(20)
    assert (outcome.kind, outcome.pair[1]) == ("applied", step), outcome


def copies(scene):
    """Return the paths of the copies in the stage."""
    (own,) = (scene.place / "stage").iterdir()
    return [path for path in own.iterdir() if path.is_dir()]


def container_of(scene, step):
    """Return the bytes of a step's container."""
    return os.path.getsize(f"{scene.job.step(step)}/{CONTAINER}")


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_a_follower_with_a_stage_loads_each_delta_as_the_directory_of_a_full_save(scene):
    follower = scene.follow(stage=str(scene.place / "stage"))
    assert "delta" in scene.presence().reads
    scene.whole(1)
    applied(follower, 1)
    for step in (2, 3, 4):
        scene.delta(step)
        applied(follower, step)
        target = scene.hook.prepared[-1]
        assert (target.version.kind, target.label) == ("weights", scene.label(step))
        assert contents(target.path) == contents(scene.place / f"export{step}")
        assert scene.engine.weights == digest_of(scene.place / f"export{step}")
        assert scene.presence().applied == (1, step)
        assert scene.presence().leases == ()
    made = [fields for name, fields in scene.told if name == "delta_applied"]
    assert [(one["step"], one["base"], one["source"]) for one in made] == [
        (2, 1, "stage"),
        (3, 2, "stage"),
        (4, 3, "stage"),
    ]
    assert len(copies(scene)) == 1  # that of step 4: what it was made of went with its last user


def test_a_follower_without_a_stage_makes_deltas_whole_below_tmpdir_until_the_trainer_has_noticed(
    scene, tmp_path, monkeypatch
):
    """Nobody is stranded: it does not say that it reads deltas, and goes on while they come."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    scene.chain(2)
    follower = scene.follow()
    for step in (2, 3, 4):
        if step > 2:
            scene.delta(step)
        applied(follower, step)
        assert scene.hook.prepared[-1].path.startswith(str(tmp_path / "tmp"))
        assert scene.engine.weights == digest_of(scene.place / f"export{step}")
        assert "delta" not in scene.presence().reads
    scene.whole(5)
    applied(follower, 5)
    assert scene.hook.prepared[-1].path == scene.payload(5)
    assert contents(tmp_path / "tmp") == {}


def test_a_follower_without_a_stage_and_without_room_says_what_to_do(scene, monkeypatch):
    follower = scene.follow()
    scene.whole(1)
    applied(follower, 1)
    scene.delta(2)
    monkeypatch.setattr(syncd.transports.files.stage.LocalDisk, "free", lambda *_: 0)
    outcome = follower.turn(20)
    assert outcome.kind == "refused"
    assert "step 2 is a delta, and cannot be rebuilt without a stage" in outcome.reason
    hint = next(fields["hint"] for name, fields in scene.told if name == "load_refused")
    assert "--stage" in hint
    assert f"syncd materialise {scene.job.root} 2 --to DIR" in hint
    assert scene.presence().applied == (1, 1)


def test_a_late_follower_reads_the_keyframe_and_the_chain_once_and_then_only_changes(scene):
    scene.chain(4)
    disk = CountingDisk()
    _, fetcher = scene.fetcher(disk)
    held = scene.fetch(fetcher, 4)
    whole = sum(record.size for record in read_manifest(scene.job.disk, scene.job.step(1)).shards)
    assert whole <= disk.bytes["1"] <= whole + len(SHARDS) * HEADER
    assert disk.steps() == {1, 2, 3, 4}
    scene.delta(5)
    newer = scene.fetch(fetcher, 5)
    assert disk.bytes["5"] <= container_of(scene, 5) + HEADER
    assert disk.steps() == {5}
    for step in (6, 7, 8):
        scene.delta(step)
    scene.fetch(fetcher, 8).close()  # versions that were skipped are applied in one go
    assert disk.steps() == {6, 7, 8}
    held.close()
    newer.close()


@pytest.mark.fault("a pruned chain is replayed on the wrong base")
def test_a_base_is_known_by_the_digest_of_its_manifest_not_by_its_number(scene):
    """A step that was written again under the number of a staged one is never taken for it."""
    scene.chain(2)
    _, fetcher = scene.fetcher()
    held = scene.fetch(fetcher, 2)
    shutil.rmtree(scene.job.step(2))
    shutil.rmtree(scene.place / "export2")
    scene.model.train()
    scene.delta(2, 1)  # other weights under the same number
    scene.delta(3)
    disk = CountingDisk()
    _, other = scene.fetcher(disk, "e8")
    scene.fetch(other, 3).close()
    assert disk.steps() == {1, 2, 3}
    held.close()


@pytest.mark.fault("a keyframe is read whole by everybody")
def test_a_running_follower_reads_at_a_keyframe_what_it_reads_of_a_delta(scene, record_line):
    """By the keyframe's shortcut; a late one reads its shards. Bytes of weights and manifests are counted."""
    scene.model.shards[SHARDS[1]]["b"] = np.zeros(6_000_000, np.float16)
    scene.whole(1)
    disk = CountingDisk()
    _, fetcher = scene.fetcher(disk)
    held, read = [scene.fetch(fetcher, 1)], {}
    for step, write in ((2, write_delta), (3, write_keyframe), (4, write_delta)):
        scene.written(step, write, share=0.1)
        disk.steps()
        held.append(scene.fetch(fetcher, step))
        read[step] = disk.bytes[str(step)]
        assert disk.steps() == {step}
    record_line(f"a follower's reads: {read[2]} bytes of a delta, {read[3]} of a keyframe with a shortcut")
    assert read[3] <= 1.05 * read[2]
    whole = read_manifest(scene.job.disk, scene.job.step(3)).whole_size
    assert read[3] < whole / 4
    _, late = scene.fetcher(disk, "late", stage="other")
    scene.fetch(late, 3).close()
    assert whole - 4096 < disk.bytes["3"] < whole + len(SHARDS) * HEADER
    assert disk.steps() == {3}
    for one in held:
        one.close()


@pytest.mark.fault("an empty delta makes everybody read the whole step again")
def test_of_a_delta_without_changes_its_tables_alone_are_read(scene):
    scene.whole(1)
    disk = CountingDisk()
    _, fetcher = scene.fetcher(disk)
    held = scene.fetch(fetcher, 1)
    manifest = write_delta(scene.job, 2, scene.model.export(scene.place / "export2"), 1)
    scene.tick()
    disk.steps()
    scene.fetch(fetcher, 2).close()
    assert disk.bytes["2"] <= 2 * manifest.size < manifest.whole_size / 10
    assert disk.steps() == {2}
    held.close()


def test_versions_before_and_after_a_keyframe_that_was_skipped_are_made_through_its_shortcut(scene):
    scene.whole(1)
    disk = CountingDisk()
    _, fetcher = scene.fetcher(disk)
    held = scene.fetch(fetcher, 1)
    for step, write in ((2, write_delta), (3, write_keyframe), (4, write_delta)):
        scene.written(step, write)
    scene.fetch(fetcher, 4).close()
    assert [path for path in disk.opened if "_3/actor/" in path] == []
    assert disk.steps() == {1, 2, 3, 4}
    held.close()


SHORTCUTS = {
    "lost": os.unlink,
    "cut short": lambda path: os.truncate(path, 100),
    "changed": lambda path: flip(path, os.path.getsize(path) - 1),
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_a_shortcut_that_cannot_be_used_is_reported_and_the_shards_are_read(name, scene):
    scene.whole(1)
    told = []
    _, fetcher = scene.fetcher(report=lambda level, event, **fields: told.append((level, event)))
    held = scene.fetch(fetcher, 1)
    scene.written(2, write_keyframe)
    SHORTCUTS[name](f"{scene.job.step(2)}/delta/delta-00002-of-00002.safetensors")
    scene.fetch(fetcher, 2).close()
    assert ("warning", "shortcut_failed") in told
    assert held.is_usable()


def test_links_are_leased_while_they_are_read(scene, monkeypatch):
    scene.chain(3)
    client, fetcher = scene.fetcher()
    seen = []
    real = syncd.transports.files.copy_files.several_at_once

    def watched(*given):
        seen.append(scene.presence("e9").leases)
        return real(*given)

    monkeypatch.setattr("syncd.transports.delta.source.several_at_once", watched)
    held = scene.fetch(fetcher, 3)
    assert seen == [(1, 2, 3)]
    assert scene.presence("e9").leases == (3,)
    scene.delta(4)
    scene.fetch(fetcher, 4).close()
    assert seen[1:] == [(3, 4)]  # the copy was enough: nothing of step 3 is read from the job
    held.close()
    assert client.confirmed is None


DAMAGE = {
    "one byte of a tile that changes": lambda copy: flip(copy / SHARDS[0], 4000),
    "one byte of a tile that does not": lambda copy: flip(
        copy / SHARDS[1], os.path.getsize(copy / SHARDS[1]) - 1
    ),
    "a byte of a header": lambda copy: flip(copy / SHARDS[0], 12),
    "a file that was cut short": lambda copy: os.truncate(copy / SHARDS[1], 1000),
    "a file that is gone": lambda copy: os.unlink(copy / SHARDS[0]),
    "a tokenizer": lambda copy: flip(copy / "tokenizer.json", 0),
}


@pytest.mark.fault("a delta is applied to a base that it was not made from")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_base_that_somebody_changed_is_found_and_never_served(name, scene):
    scene.chain(2)
    told = []
    disk = CountingDisk()
    _, fetcher = scene.fetcher(disk, report=lambda level, event, **fields: told.append((level, event)))
    held = scene.fetch(fetcher, 2)
    (copy,) = copies(scene)
    DAMAGE[name](copy)
    disk.steps()
    scene.delta(3)
    newer = scene.fetch(fetcher, 3)  # byte for byte that of a full save
    assert ("warning", "stage_copy_damaged") in told
    assert disk.steps() == {1, 2, 3}
    assert not copy.exists()
    assert not held.is_usable()
    scene.fetch(fetcher, 2).close()  # and is made again at once if it is wanted
    newer.close()


def test_an_engine_never_goes_back_to_a_staged_copy_that_was_changed(scene):
    scene.chain(2)
    _, fetcher = scene.fetcher()
    held = scene.fetch(fetcher, 2)
    assert held.is_usable()
    flip(copies(scene)[0] / SHARDS[0], 4000)
    assert not held.is_usable()


@pytest.mark.fault("a delta is applied to a base that it was not made from")
def test_a_damaged_link_is_refused_and_its_base_stays(scene):
    scene.chain(2)
    _, fetcher = scene.fetcher()
    held = scene.fetch(fetcher, 2)
    scene.delta(3)
    container = f"{scene.job.step(3)}/{CONTAINER}"
    flip(container, os.path.getsize(container) - 1)
    with pytest.raises(RefusedError, match="does not match its checksum"):
        scene.fetch(fetcher, 3)
    assert held.is_usable()
    flip(container, os.path.getsize(container) - 1)
    scene.fetch(fetcher, 3).close()


def test_a_lost_link_and_a_parent_that_was_written_again_are_refused_unless_the_base_is_staged(scene):
    scene.chain(3)
    _, fetcher = scene.fetcher()
    held = scene.fetch(fetcher, 3)
    scene.delta(4)
    shutil.rmtree(scene.job.step(2))
    scene.fetch(fetcher, 4).close()  # made of the copy of step 3
    _, late = scene.fetcher(name="late", stage="other")
    with pytest.raises(RefusedError, match="stored as changes of step 2, which does not exist"):
        scene.fetch(late, 4)
    held.close()


def test_a_step_that_is_removed_while_it_is_read_is_skipped(scene):
    scene.chain(3)

    class Removing(LocalDisk):
        def read_at(self, path, offset, length):
            shutil.rmtree(scene.job.step(3), ignore_errors=True)
            shutil.rmtree(scene.job.step(2), ignore_errors=True)
            return super().read_at(path, offset, length)

    _, fetcher = scene.fetcher(Removing())
    with pytest.raises(SyncdError) as ended:
        fetcher.fetch(3, LoadTimings(SystemClock()))
    assert ended.value.code == "try_again"
    assert copies(scene) == []


def _build(place, die):
    """Fetch step 3 in a process of its own, which kills itself at the Nth file operation of the build."""
    count = [0]

    def dying(real):
        def call(*given, **more):
            count[0] += 1
            if count[0] == die:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **more)

        return call

    module = "syncd.transports.delta.chain"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("apply", "read_range", "_require_unchanged", "digest_file"):
            patch.setattr(f"{module}.{name}", dying(getattr(__import__(module, fromlist=[name]), name)))
        patch.setattr(os, "rename", dying(os.rename))
        patch.setattr(os, "mkdir", dying(os.mkdir))
        with Client.open(place / "job", "explorer", "killed", heartbeat=False) as client:
            options = FollowOptions(stage=str(place / "stage"))
            fetcher = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, lambda *_, **__: None)
            fetcher.fetch(3, LoadTimings(SystemClock()))
            os._exit(7)


@pytest.mark.slow
@pytest.mark.fault("a patch that was applied half drifts until a restart")
def test_a_build_that_is_killed_at_each_frame_leaves_the_base_whole_and_no_keyframe_is_read_again(scene):
    """Nobody else uses the base: it outlives the follower that was killed."""
    scene.chain(2)
    _, first = scene.fetcher(name="first")
    held = scene.fetch(first, 2)
    kept = contents(scene.place / "stage")
    shutil.copytree(scene.place / "stage", scene.place / "kept")
    scene.delta(3)
    held.close()
    fork, exits = multiprocessing.get_context("fork"), []
    while 7 not in exits:
        shutil.rmtree(scene.place / "stage")
        shutil.copytree(scene.place / "kept", scene.place / "stage")
        child = fork.Process(target=_build, args=(scene.place, len(exits) + 1))
        child.start()
        child.join(60)
        exits.append(child.exitcode)
        left = contents(scene.place / "stage")
        if not any(path.name.startswith("1.3-") for path in copies(scene)):
            assert {name: left.get(name) for name in kept} == kept
        disk = CountingDisk()
        client, fetcher = scene.fetcher(disk, f"e{len(exits)}")
        scene.fetch(fetcher, 3).close()
        assert disk.steps() <= {3}
        assert not list((scene.place / "stage").rglob("*.tmp"))
        client.close()
    assert exits.count(-signal.SIGKILL) == len(exits) - 1 > 15


FAULTS = (
    "syncd.protocol.local_disk.LocalDisk.read",
    "syncd.protocol.local_disk.LocalDisk.read_at",
    "syncd.protocol.local_disk.LocalDisk.stat",
    "syncd.protocol.local_disk.LocalDisk.refresh",
    "syncd.transports.delta.source.new_file",
    "syncd.transports.delta.source.make_directories",
    "os.rename",
)
"""What the build calls of the job's disk and of the stage's."""


@pytest.mark.slow
@pytest.mark.fault("a host's base is ahead of an apply that failed")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_each_call_of_a_build_ends_it_cleanly_and_the_next_one_succeeds(scene, number):
    scene.chain(2)
    _, fetcher = scene.fetcher()
    held = scene.fetch(fetcher, 2)
    scene.delta(3)
    left, ended = 0, []
    while len(ended) == left:
        calls = [0]

        def failing(real, nth=left, calls=calls):
            def call(*given, **more):
                if not any("/.syncd/" in str(one) or "config.toml" in str(one) for one in given):
                    calls[0] += 1
                    if calls[0] == nth + 1:
                        raise OSError(number, os.strerror(number), str(given[-1]))
                return real(*given, **more)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in FAULTS:
                patch.setattr(name, failing(resolve_name(name)))
            try:
                fetcher.fetch(3, LoadTimings(SystemClock())).close()
            except (OSError, SyncdError) as error:
                ended.append(error)
        left += 1
        assert not list((scene.place / "stage").rglob("*.tmp"))
        for path in copies(scene):
            step = path.name.partition(".")[2].partition("-")[0]
            assert contents(path) == contents(scene.place / f"export{step}")
            if step == "3":
                shutil.rmtree(path)
    assert left > 10
    full = [error for error in ended if isinstance(error, StageFullError)]
    assert bool(full) == (number == errno.ENOSPC)
    scene.fetch(fetcher, 3).close()
    held.close()


def test_while_the_stage_is_full_the_trainer_is_told_to_save_whole_steps(scene, monkeypatch):
    follower = scene.follow(stage=str(scene.place / "stage"), retries=0)
    scene.whole(1)
    applied(follower, 1)
    scene.delta(2)
    free = syncd.transports.files.stage.LocalDisk.free
    monkeypatch.setattr(syncd.transports.files.stage.LocalDisk, "free", lambda *_: 0)
    outcome = follower.turn(20)
    assert outcome.kind == "failed"
    assert "delta" not in scene.presence().reads
    scene.whole(3)
    applied(follower, 3)
    assert scene.hook.prepared[-1].path == scene.payload(3)
    assert "delta" not in scene.presence().reads
    monkeypatch.setattr(syncd.transports.files.stage.LocalDisk, "free", free)
    scene.whole(4)
    applied(follower, 4)
    assert "delta" in scene.presence().reads


def test_a_follower_that_starts_beside_a_running_engine_can_go_back_to_a_delta(scene):
    scene.chain(3)
    applied(scene.follow(stage=str(scene.place / "stage")), 3)
    again = scene.follow("e1", stage=str(scene.place / "other"), retries=0)
    assert again.applied == (1, 3)
    scene.delta(4)
    scene.engine.fails["load"] = 1
    assert again.turn(20).kind == "failed"
    assert scene.hook.aborted[-1].label == scene.engine.label == scene.label(3)
    assert scene.engine.weights == digest_of(scene.place / "export3")


def test_several_followers_of_a_host_read_a_delta_once(scene):
    disk = CountingDisk()
    scene.whole(1)
    fetchers = [scene.fetcher(disk, f"e{number}")[1] for number in range(3)]
    held = [scene.fetch(fetcher, 1) for fetcher in fetchers]
    scene.delta(2)
    disk.steps()
    held += [scene.fetch(fetcher, 2) for fetcher in fetchers]
    assert disk.bytes["2"] <= container_of(scene, 2) + HEADER
    assert len({one.directory.path for one in held[3:]}) == 1
    for one in held:
        one.close()
