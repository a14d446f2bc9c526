"""What tree 658d26ae wrote is read and continued as it was: jobs, presences, full checkpoints, batches, deltas.

`tests/data/658d26ae/write.py` wrote the jobs, below /ckpt.
"""

import json
import re
import tarfile
from pathlib import Path

import pytest
from support.paths import TESTS
from support.whole_jobs import alone

JOBS = TESTS / "data" / "658d26ae" / "jobs.tar.gz"
PLACE = re.compile(r"/ckpt\b")
LONG = 300.0
"""A bound that only a failing test reaches."""

VERSIONS = {"job": (1, 3), "verl": (1, 2), "deltas": (1, 3)}


@pytest.fixture
def jobs(tmp_path):
    """The jobs, whose files name where they lie now."""
    with tarfile.open(JOBS) as archive:
        archive.extractall(tmp_path, filter="data")
    for file in tmp_path.glob("*/config.toml"):
        file.write_text(PLACE.sub(str(tmp_path), file.read_text()))
    return tmp_path


def files_of(job: Path) -> dict[str, bytes]:
    """Return the content of the steps of a job."""
    return {str(path): path.read_bytes() for path in sorted(job.glob("global_step_*/**/*")) if path.is_file()}


def train(job: Path, steps: int) -> None:
    """Train a job on to a step."""
    file = job.with_suffix(".toml")
    file.write_text((job / "config.toml").read_text())
    options = (f"--trainer.total_steps={steps}", "--trainer.nproc=1")
    kind = "verl" if job.name == "verl" else "torch"
    trainer = alone(f"{file}.log", file, *options, kind=kind, cwd=job.parent)
    try:
        assert trainer.wait(LONG) == 0, trainer.said()
    finally:
        trainer.end()


@pytest.mark.parametrize("name", VERSIONS)
def test_status_reads_version_and_presences(jobs, shell, name):
    status = shell("status", jobs / name, "--json").document
    assert (status["version"]["generation"], status["version"]["step"]) == VERSIONS[name]
    applied = {explorer["id"]: explorer["applied"] for explorer in status["explorers"]}
    pair = {"generation": VERSIONS[name][0], "step": VERSIONS[name][1]}
    assert applied == ({} if name == "deltas" else {"e0": pair})


@pytest.mark.parametrize("name", VERSIONS)
def test_each_step_is_verified_byte_by_byte(jobs, shell, name):
    steps = [int(path.name.rpartition("_")[2]) for path in (jobs / name).glob("global_step_*")]
    assert len(steps) >= 2
    for step in steps:
        assert shell("verify", jobs / name, step, "--deep").code == 0


@pytest.mark.parametrize("name", VERSIONS)
def test_a_daemon_publishes_nothing_again_and_changes_no_step(jobs, shell, name):
    before, version = files_of(jobs / name), (jobs / name / ".syncd/version.json").read_bytes()
    assert shell("watch", jobs / name, "--once").code == 0
    assert files_of(jobs / name) == before
    after = json.loads((jobs / name / ".syncd/version.json").read_bytes())
    old = json.loads(version)
    assert (after["generation"], after["step"]) == (old["generation"], old["step"])


def test_a_delta_is_made_whole(jobs, shell):
    pytest.importorskip("numpy", reason="deltas need numpy")
    load_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").load_file
    assert shell("materialise", jobs / "deltas", 3, "--to", jobs / "whole").code == 0
    (file,) = (jobs / "whole").glob("*.safetensors")
    tensor = load_file(file)["w"].reshape(-1)
    assert [float(tensor[place]) for place in (0, 47, 48, 4095)] == [3.0, 50.0, 48.0, 4095.0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "last"), [("job", 3), ("verl", 2)])
def test_training_goes_on_from_the_full_checkpoint_with_the_batches_that_are_left(jobs, name, last):
    pytest.importorskip("torch", reason="the trainer needs torch")
    job = jobs / name
    train(job, last + 1)
    figures = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    trained = [line["step"] for line in figures if "actor/grad_norm" in line["metrics"]]
    assert trained == list(range(1, last + 2))
    assert (job / f"global_step_{last + 1}" / "manifest.json").is_file()
    if name == "verl":
        assert_equal(job / "global_step_3" / "actor", jobs / "after_verl.safetensors")


def assert_equal(actor: Path, expected: Path) -> None:
    """Compare weights with those that tree 658d26ae came to; other processors may round otherwise."""
    import torch
    from safetensors.torch import load_file

    (file,) = actor.glob("*.safetensors")
    ours, theirs = load_file(file), load_file(expected)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-6)
