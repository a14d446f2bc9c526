"""Steps that are sealed and nothing that an engine can load, as older releases wrote them: nobody takes them."""

import json
import os

import pytest
from support.fake_hook import START
from support.followers import Scene
from support.jobs import shard_bytes, write_step

from syncd.errors import UsageError
from syncd.protocol.digest import digest_bytes
from syncd.protocol.manifest import Manifest, encode_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version, encode_version, read_version, write_marker
from syncd.synchronizer import Synchronizer

EMPTY = shard_bytes({})
TENSOR = shard_bytes({"w": (2, 2)})

STEPS = {
    "no shards": {},
    "no tensors": {"actor/model.safetensors": (EMPTY, 0)},
    "all shards outside of actor": {"critic/model.safetensors": (TENSOR, 1)},
    "one tensor in two shards": {
        "actor/model-00001-of-00002.safetensors": (TENSOR, 1),
        "actor/model-00002-of-00002.safetensors": (TENSOR, 1),
    },
}


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


def write_sealed(job, step, content):
    """Write a step with a manifest of which nothing was checked."""
    path = job.step(step)
    job.disk.make_directory(f"{path}/actor")
    for name, (data, _) in content.items():
        job.disk.make_directory(os.path.dirname(f"{path}/{name}"))
        job.disk.replace(f"{path}/{name}", data)
    shards = [
        FileRecord(name, len(data), digest_bytes(data), count) for name, (data, count) in content.items()
    ]
    job.disk.replace(f"{path}/manifest.json", encode_manifest(Manifest(step, 1, "run", tuple(shards))))


def publish_by_hand(job, step):
    """Publish a step as a daemon of an older release would."""
    digest = json.loads(job.disk.read(f"{job.step(step)}/manifest.json"))["digest"]
    version = Version(1, step, "weights", f"global_step_{step}/actor", digest)
    job.disk.make_directory(job.state)
    job.disk.replace(job.version, encode_version(version))


@pytest.mark.parametrize("case", STEPS)
def test_the_daemon_never_publishes_a_step_without_loadable_weights(scene, case):
    write_sealed(scene.job, 2, STEPS[case])
    write_marker(scene.job.disk, scene.job.marker, 2)
    scene.tick()
    assert read_version(scene.job) is None
    write_step(scene.job, 3)
    scene.tick()
    assert read_version(scene.job).step == 3


@pytest.mark.parametrize("case", STEPS)
def test_syncd_verify_reports_a_step_without_loadable_weights_as_damaged(scene, shell, case):
    write_sealed(scene.job, 2, STEPS[case])
    done = shell("verify", scene.root, 2)
    assert done.code == 65, done.err
    assert done.out.strip()


@pytest.mark.parametrize("case", STEPS)
def test_the_follower_refuses_a_step_without_loadable_weights(scene, case):
    write_sealed(scene.job, 2, STEPS[case])
    publish_by_hand(scene.job, 2)
    follower = scene.follow(retries=0)
    outcome = follower.turn(timeout=10)
    assert outcome.kind == "refused", outcome
    assert (scene.engine.weights, scene.engine.log) == (START, [])


def test_an_empty_state_dict_is_refused_before_anything_is_written(scene):
    with Synchronizer.open(scene.root, "trainer") as trainer, pytest.raises(UsageError, match="no tensor"):
        trainer.set_model_state_dict({}, 5)
    assert not [entry.name for entry in scene.job.disk.list(scene.root) if "global_step" in entry.name]
