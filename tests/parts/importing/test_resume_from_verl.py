"""A job of verl's is continued here: after `trainer import --resume` training goes on bit for bit as verl's would."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.needed import need

need("verl", "the trainer needs verl")

import torch  # noqa: E402
from support.engine_cases import equal  # noqa: E402
from support.matrices import LONG  # noqa: E402
from support.paths import PYTHONPATH, TESTS  # noqa: E402

from syncd.protocol.layout import Job  # noqa: E402
from trainer.cli.main import run  # noqa: E402
from trainer.export import export  # noqa: E402
from trainer.parts.importing import full_checkpoint  # noqa: E402
from trainer.resume import find_state  # noqa: E402

_LONG = 900.0
pytestmark = [pytest.mark.group("engines"), pytest.mark.slow, pytest.mark.timeout(2 * _LONG), LONG]


@pytest.fixture(scope="module")
def place(models, tmp_path_factory):
    """Return where verl's job, the imported one and what each rank found are."""
    place = tmp_path_factory.mktemp("resumed")
    # The program shares the ranks' code with that of tests/trainer/engines.
    path = f"{PYTHONPATH}{os.pathsep}{TESTS}/trainer/engines/programs"
    done = subprocess.run(
        [sys.executable, f"{TESTS}/parts/importing/programs/resumed.py", place, models],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=_LONG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def found(place, leg, rank):
    return torch.load(place / f"{leg}.{rank}.pt", weights_only=False)


def figures(leg):
    """Return the figures of each step but those of time and memory."""
    return [{name: one[name] for name in one if name.startswith(("actor/", "kl/"))} for one in leg["metrics"]]


def test_training_goes_on_bit_for_bit(place):
    for rank in range(2):
        expected, resumed = found(place, 0, rank), found(place, 1, rank)
        assert resumed["state"]["step"] == 2
        assert equal(resumed["trained"], expected["trained"])
        assert any("loss" in name for name in figures(expected)[0])
        assert figures(resumed) == figures(expected)
        assert not equal(expected["saved"], expected["trained"]), "it learnt"


def test_the_imported_job_is_a_full_checkpoint_without_foreign_pickles(place):
    step = place / "after/global_step_2"
    assert (place / "after/latest_checkpointed_iteration.txt").read_text() == "2"
    assert json.loads((step / "training/trainer.json").read_text())["world_size"] == 2
    for path in sorted((step / "training").glob("*.pt")):
        theirs = place / "verl/global_step_2/actor" / path.name
        one, other = (torch.load(file, weights_only=False) for file in (path, theirs))
        assert equal(one, other), path.name
    assert not list(place.rglob(".import"))


@pytest.mark.parametrize(
    ("how", "more", "text"),
    [
        (
            "nothing",
            ["--engine.strategy", "fsdp"],
            "only verl with fsdp2 is resumed, and this job is of verl with fsdp",
        ),
        ("nothing", ["--model.dtype", "bfloat16"], "its weights are float32, and model.dtype is bfloat16"),
        ("no optimizer", [], "the step has no optim_world_size_2_rank_1.pt"),
        ("torn", [], "not a complete file of torch.save"),
        ("code", [], "objects that only load by running code from it"),
    ],
)
def test_what_cannot_be_resumed_is_said_and_nothing_is_written(place, tmp_path, capsys, how, more, text):
    step = tmp_path / "verl/global_step_2"
    shutil.copytree(place / "verl/global_step_2", step)
    optimizer = step / "actor/optim_world_size_2_rank_1.pt"
    if how == "no optimizer":
        optimizer.unlink()
    elif how == "torn":
        optimizer.write_bytes(optimizer.read_bytes()[:-999])
    elif how == "code":
        torch.save({"state": {0: Marked(str(tmp_path / "ran"))}, "param_groups": []}, optimizer)
    line = [
        "import",
        str(place / "verl.json"),
        "--to",
        str(tmp_path / "job.toml"),
        "--from-checkpoint",
        str(step),
    ]
    code = run([*line, "--resume", "--job.dir", str(tmp_path / "job"), "--engine.device", "cpu", *more])
    assert code == (65 if how == "torn" else 78)
    assert text in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["verl"]


def test_of_two_imports_into_one_directory_the_second_leaves_the_first_alone(place, tmp_path, monkeypatch):
    shutil.copytree(place / "verl/global_step_2", tmp_path / "verl/global_step_2")
    codes = []

    def imported(name):
        job = ["--to", str(tmp_path / name), "--job.dir", str(tmp_path / "job"), "--engine.device", "cpu"]
        step = ["--from-checkpoint", str(tmp_path / "verl/global_step_2"), "--resume"]
        codes.append(run(["import", str(place / "verl.json"), *job, *step]))

    def export_after_another_import(*arguments):
        monkeypatch.setattr(full_checkpoint, "export", export)
        imported("second.toml")
        export(*arguments)

    monkeypatch.setattr(full_checkpoint, "export", export_after_another_import)
    imported("first.toml")
    assert sorted(codes) == [0, 2]
    assert find_state(Job.at(tmp_path / "job")).step == 2
    assert sorted(os.listdir(tmp_path)) == ["first.toml", "job", "verl"]


class Marked:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (open, (self._path, "w"))
