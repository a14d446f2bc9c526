"""The examples, run as a user would run them."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from support import checker, forked
from support.fake_engines import FakeVllm

from syncd.experience.table import decode_batch
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, read_manifest
from syncd.protocol.presence import path_of, read_presence
from syncd.protocol.version import pair_of
from syncd.synchronizer import RunningStatus, Synchronizer

pytestmark = [pytest.mark.group("forked"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_LONG = 150.0
FOLLOWERS = ("host-0", "host-1")


@pytest.fixture
def job(tmp_path):
    """Return a job with a daemon."""
    place = tmp_path / "job"
    place.mkdir()
    with running(tmp_path, "daemon", "-m", "syncd", "watch", str(place), "--keep-last", "9") as daemon:
        yield str(place)
        daemon.terminate()
        assert ended(daemon) == 0


@contextlib.contextmanager
def running(place, name, *argv):
    made = forked.start(f"{place}/{name}.log", ENVIRONMENT, *map(str, argv))
    try:
        yield made
    finally:
        made.end()


def ended(process):
    return process.wait(_LONG)


def said(place, name):
    return (place / f"{name}.log").read_text(errors="replace")[-3000:]


def presence(job, name):
    return read_presence(Job.at(job).disk, path_of(Job.at(job).explorers, name))


def published(job):
    """Return the steps that were published, in their order, once the daemon has followed the marker."""
    with Synchronizer.open(job, "observer") as sync:
        newest = checker.marker(job)
        sync.wait_for(lambda: sync.get_latest_model_version() == newest, 30)
    disk = Job.at(job).disk
    for step in checker.sealed(job):
        assert not list(
            damaged_files(disk, Job.at(job).step(step), read_manifest(disk, Job.at(job).step(step)))
        )
    return checker.sealed(job)


def tensors_of(job, step):
    actor = f"{job}/global_step_{step}/actor"
    names = []
    for shard in sorted(name for name in os.listdir(actor) if name.endswith(".safetensors")):
        with safe_open(f"{actor}/{shard}", "pt") as file:
            names += file.keys()
    return names


def test_the_pytorch_trainer_and_explorer_examples_run_together(job, tmp_path):
    train = (EXAMPLES / "publish/pytorch.py", job, "--steps", "6", "--every", "2", "--pause", "0.3")
    explore = (EXAMPLES / "follow/explorer.py", job, "--name", "e0", "--pause", "0.05")
    with running(tmp_path, "trainer", *train) as trainer, running(tmp_path, "e0", *explore) as explorer:
        assert ended(trainer) == 0, said(tmp_path, "trainer")
        assert ended(explorer) == 0, said(tmp_path, "e0")
    assert published(job) == [2, 4, 6]
    assert tensors_of(job, 6) == ["weight"]
    found = presence(job, "e0")
    assert (found.status, found.applied) == (RunningStatus.STOPPED, (1, 6))
    batches = sorted(Path(job, "experiences/e0").glob("*.parquet"))
    rollouts = [one for path in batches for one in decode_batch(path.read_bytes(), str(path))]
    assert {(one.generation, one.step) for one in rollouts} <= {(1, 2), (1, 4), (1, 6)}
    assert all(len(one.logprobs) == 8 for one in rollouts)
    assert rollouts


@pytest.fixture
def model(tmp_path):
    make = (EXAMPLES / "arithmetic/make.py", tmp_path / "base", "--examples", "1")
    with running(tmp_path, "make", *make) as made:
        assert ended(made) == 0, said(tmp_path, "make")
    return tmp_path / "base/model"


def needs(example, *modules):
    """Return an example as a parameter, skipped where it cannot run."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed"
    return pytest.param(example, marks=pytest.mark.skipif(bool(missing), reason=reason))


@pytest.mark.parametrize(
    "example",
    [needs("transformers_trainer", "transformers", "accelerate"), needs("trl_grpo", "trl", "datasets")],
)
def test_the_trainer_callback_examples_publish_each_interval_and_the_end(job, model, tmp_path, example):
    train = (EXAMPLES / f"publish/{example}.py", job, "--model", model, "--steps", "3", "--every", "2")
    with running(tmp_path, "trainer", *train) as trainer:
        assert ended(trainer) == 0, said(tmp_path, "trainer")
    assert published(job) == [2, 3], "each second step, and the last one"
    assert "model.layers.0.mlp.up_proj.weight" in tensors_of(job, 3)
    assert os.path.isfile(f"{job}/global_step_3/actor/config.json")


def test_the_one_stage_example_shares_one_copy_between_engines(job, tmp_path):
    engines = [FakeVllm(), FakeVllm()]
    stage = tmp_path / "stage"
    settings = {
        "STAGE": str(stage),
        "NAME": "host",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    command = [EXAMPLES / "follow/one_stage.sh", job, *(f"vllm={engine.address}" for engine in engines)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
        trainer = stack.enter_context(Synchronizer.open(job, "trainer", poll=0.01))
        log = stack.enter_context(open(tmp_path / "follow.log", "wb"))
        script = stack.enter_context(
            subprocess.Popen(command, env=os.environ | ENVIRONMENT | settings, stdout=log, stderr=log)
        )
        stack.callback(script.terminate)
        for step in (1, 2):
            trainer.set_model_state_dict({"w": ("F32", (2, 2), bytes([step] * 16))}, step)
            trainer.wait_for(lambda step=step: has_been_applied(job, step), _LONG)
        trainer.close()
        assert script.wait(_LONG) == 0, said(tmp_path, "follow")
    assert [pair_of(engine.label) for engine in engines] == [(1, 2), (1, 2)]
    staged = {presence(job, name).info["staged"] for name in FOLLOWERS}
    assert len(staged) == 1, "one copy for both"
    assert staged.pop().startswith(f"{stage}/job-")


def has_been_applied(job, step):
    with contextlib.suppress(FileNotFoundError):
        return all(presence(job, name).applied == (1, step) for name in FOLLOWERS)
    return False
