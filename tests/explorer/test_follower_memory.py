"""A follower on the trainer's host loads what is published from memory, and from files where memory is wrong."""

import os

import pytest
from support.followers import Scene
from support.remembered import remember, shard_of

from syncd.protocol.file_lock import lock_file
from syncd.protocol.layout import ACTOR
from syncd.protocol.memory_copies import copies_in, lock_directory
from syncd.synchronizer import Synchronizer

torch = pytest.importorskip("torch", reason="needs torch")

LONG = 60.0


class MemoryScene(Scene):
    """A job whose trainer has told where its copies are, and keeps that place."""

    def __init__(self, root, memory):
        super().__init__(root)
        self.memory, self.owner = str(memory), None
        self.trainer = self._stack.enter_context(Synchronizer.open(self.root, "trainer"))

    def publish(self, step, **options):
        manifest = super().publish(step, **options)
        self.place = remember(self.job, manifest, self.memory)
        if self.owner is None:
            self.owner = lock_directory(self.place.directory)
            self.trainer.publish_copies(self.place)
        return manifest

    def paths(self):
        return [target.path for target in self.hook.prepared]

    def copy(self, manifest):
        return f"{self.place.copy(manifest.step, manifest.attempt)}/{ACTOR}"


@pytest.fixture
def scene(tmp_path):
    (tmp_path / "memory").mkdir()
    made = MemoryScene(tmp_path / "job", tmp_path / "memory")
    yield made
    made.close()


def applied(scene, follower, step):
    outcome = follower.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("applied", (1, step)), outcome
    assert scene.presence().applied == (1, step)


@pytest.mark.parametrize("verify", ["size", "header", "content"])
def test_a_version_is_loaded_from_memory_and_leased_by_its_files(scene, verify):
    follower = scene.follow(verify=verify)
    held = []
    scene.engine.doing["load"] = lambda: held.append((scene.presence().leases, owned_copies(scene)))
    for step in (1, 2):
        manifest = scene.publish(step)
        applied(scene, follower, step)
        assert scene.paths()[-1] == scene.copy(manifest)
        assert scene.hook.prepared[-1].verified is (verify == "content")
        assert bool(scene.hook.prepared[-1].tensors) is (verify != "size")
        loaded = scene.presence().info["loaded"]
        assert (loaded["step"], loaded["source"]) == (step, "memory")
        assert loaded["seconds"] > 0
        assert scene.presence().leases == (step,), "files are what it goes back to"
        assert owned_copies(scene) == []
    assert [leases for leases, _ in held] == [(1,), (1, 2)]
    assert [len(copies) for _, copies in held] == [1, 1]


def owned_copies(scene):
    """Return the copies that somebody reads."""
    directory, found = scene.place.directory, []
    for name in copies_in(directory):
        held = lock_file(f"{directory}/{name}.lock", exclusive=True)
        if held is None:
            found.append(name)
        else:
            held.close()
    return found


def test_a_failed_version_rolls_back_to_the_files_of_the_one_before(scene):
    follower = scene.follow(retries=0)
    scene.publish(1)
    applied(scene, follower, 1)
    scene.publish(2)
    scene.engine.fails["commit"] = 2
    assert follower.turn(timeout=LONG).kind == "failed"
    assert [target.path for target in scene.hook.aborted] == [scene.payload(1)] * 2
    assert scene.engine.label == scene.label(1)


def test_a_failed_load_from_memory_falls_back_to_files_in_the_same_turn(scene):
    """It is not even counted as an attempt: the version comes from its files in the same turn."""
    follower = scene.follow(retries=0)
    scene.publish(1)
    applied(scene, follower, 1)
    manifest = scene.publish(2)
    scene.engine.fails["load"] = 1
    applied(scene, follower, 2)
    assert scene.paths()[1:] == [scene.copy(manifest), scene.payload(2)]
    assert "copy_load_failed" in scene.names()
    assert scene.presence().info["loaded"]["source"] == "files"
    assert owned_copies(scene) == []
    third = scene.publish(3)
    applied(scene, follower, 3)
    assert scene.paths()[-1] == scene.copy(third), "the next one is taken from memory again"


def damaged(path):
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def headless(path):
    with open(path, "r+b") as file:
        file.write(b"\xff" * 8)


@pytest.mark.parametrize(("verify", "harm"), [("header", headless), ("content", damaged)])
def test_a_damaged_copy_is_refused_before_the_engine_is_touched(scene, verify, harm):
    follower = scene.follow(verify=verify)
    manifest = scene.publish(1)
    harm(shard_of(scene.place, manifest))
    applied(scene, follower, 1)
    assert scene.paths() == [scene.payload(1)]
    assert "memory_copy_refused" in scene.names()


def test_a_model_in_this_process_replaces_a_damaged_copy_by_the_files(scene):
    """They are hashed on their way: the model goes back, and takes the version from its files."""
    from explorer_hooks.hooks.transformers import TransformersHook

    model = Layered()
    hook = TransformersHook(model, timeout=60)
    follower = scene.follow("e0", hook, retries=0, verify="header")
    scene.publish(1)
    applied(scene, follower, 1)
    manifest = scene.publish(2)
    damaged(shard_of(scene.place, manifest))
    applied(scene, follower, 2)
    assert "copy_load_failed" in scene.names()
    expected = torch.tensor([(2 + place) % 251 for place in range(4 * 8 * 4)], dtype=torch.uint8)
    assert torch.equal(model.layer.get_parameter("1.weight").detach().view(torch.uint8).reshape(-1), expected)


class Layered(torch.nn.Module):
    """Has the one tensor of the steps that are written by hand."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.ModuleDict({"1": torch.nn.Linear(8, 4, bias=False)})


@pytest.mark.parametrize("where", ["another boot", "not there", "nothing is told", "open to others"])
def test_a_version_without_a_usable_copy_is_loaded_from_files(scene, where):
    scene.publish(1)
    if where == "another boot":
        scene.trainer.publish_copies(type(scene.place)(scene.place.directory, "another"))
    elif where == "not there":
        scene.trainer.publish_copies(type(scene.place)(f"{scene.place.directory}x", scene.place.boot))
    elif where == "nothing is told":
        scene.trainer.publish_copies(None)
    else:
        os.chmod(scene.place.directory, 0o755)
    follower = scene.follow()
    applied(scene, follower, 1)
    assert scene.paths() == [scene.payload(1)]
    assert scene.presence().info["loaded"]["source"] == "files"


def test_a_copy_in_memory_is_loaded_without_filling_the_stage(scene, tmp_path):
    follower = scene.follow(stage=str(tmp_path / "stage"))
    manifest = scene.publish(1)
    applied(scene, follower, 1)
    assert scene.paths() == [scene.copy(manifest)]
    assert "staged" not in scene.presence().info
    scene.trainer.publish_copies(None)
    scene.publish(2)
    applied(scene, follower, 2)
    assert scene.presence().info["loaded"]["source"] == "stage"
