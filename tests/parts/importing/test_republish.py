"""`trainer republish`: steps of a running foreign job become safetensors in a job of ours, bit for bit."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from safetensors import safe_open  # noqa: E402
from support import forked  # noqa: E402
from support.paths import PYTHONPATH  # noqa: E402

from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.version import read_version  # noqa: E402
from syncd.synchronizer import Synchronizer  # noqa: E402
from trainer.cli.main import run  # noqa: E402
from trainer.config.load import load_config  # noqa: E402

pytestmark = pytest.mark.slow


def weights(value: float) -> dict[str, "torch.Tensor"]:
    torch.manual_seed(int(value))
    return {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.full((4,), value)}


def verl_step(job: Path, step: int, value: float, **others: "torch.Tensor") -> None:
    """Write what verl's FSDP checkpoint of one rank is, the tracker last."""
    actor = job / f"global_step_{step}/actor"
    (actor / "huggingface").mkdir(parents=True, exist_ok=True)
    (actor / "huggingface/config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "dtype": "float32"})
    )
    torch.save(weights(value) | others, actor / "new.pt")
    os.replace(actor / "new.pt", actor / "model_world_size_1_rank_0.pt")
    (job / "latest_checkpointed_iteration.txt").write_text(str(step))


def republish(job: Path, out: Path, log: Path) -> forked.Process:
    environment = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    argv = ("-m", "trainer", "republish", job, "--to", out, "--dtype", "keep")
    return forked.start(log, environment, *argv)


@contextlib.contextmanager
def republishing(job: Path, out: Path, log: Path) -> Iterator[forked.Process]:
    """Republish until the end of the block, then stop it as systemd does."""
    process = republish(job, out, log)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.end()
        print(process.said())


def until(holds: Callable[[], bool], process: forked.Process, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.1)


def published(out: Path) -> int:
    version = read_version(Job.at(str(out))) if out.is_dir() else None
    return -1 if version is None else version.step


def test_steps_are_served_while_the_job_runs_and_after_it_was_rewound(tmp_path: Path) -> None:
    job, out = tmp_path / "verl", tmp_path / "ours"
    verl_step(job, 5, 1.0)
    with republishing(job, out, tmp_path / "log") as process:
        until(lambda: published(out) == 5, process)
        verl_step(job, 10, 2.0)
        until(lambda: published(out) == 10, process)
        with Synchronizer.open(out) as reader:
            tensors, step = reader.get_model_state_dict()
            assert step == 10
            assert isinstance(tensors, dict)
            for name, tensor in weights(2.0).items():
                assert bytes(tensors[name].data) == tensor.numpy().tobytes()
                assert tensors[name].dtype == "F32"
        (job / "latest_checkpointed_iteration.txt").write_text("5")  # verl resumes from its step 5 ...
        until(lambda: published(out) == 5, process)
        verl_step(job, 10, 3.0)  # ... and writes step 10 again
        until(lambda: published(out) == 10, process)
        with Synchronizer.open(out) as reader:
            tensors, _ = reader.get_model_state_dict()
            assert isinstance(tensors, dict)
            assert (
                bytes(tensors["model.norm.weight"].data)
                == weights(3.0)["model.norm.weight"].numpy().tobytes()
            )
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ours")]
    record = json.loads((out / "imported.json").read_text())
    assert sorted(record["steps"]) == ["10", "5"]
    assert not any(name.endswith((".pt", ".bin")) for _, _, names in os.walk(out) for name in names)


def test_a_step_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    job, out = tmp_path / "verl", tmp_path / "ours"
    verl_step(job, 5, 1.0)
    with republishing(job, out, tmp_path / "log") as process:
        until(lambda: published(out) == 5, process)
        verl_step(job, 10, 2.0, bias=torch.tensor([float("nan")]))
        until(lambda: "the next step follows" in process.said(), process)
        verl_step(job, 15, 3.0)
        until(lambda: published(out) == 15, process)
        assert process.said().count("the next step follows") == 1


def test_once_ends_with_the_error_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    verl_step(tmp_path / "verl", 5, 1.0, bias=torch.tensor([float("nan")]))
    assert run(["republish", str(tmp_path / "verl"), "--to", str(tmp_path / "ours"), "--once"]) == 65


def test_what_does_not_go_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job").mkdir()
    assert run(["republish", str(tmp_path / "job")]) == 2
    assert run(["republish", str(tmp_path / "job"), "--to", str(tmp_path / "job/inside"), "--once"]) == 2
    assert "beside it" in capsys.readouterr().err
    assert run(["republish", str(tmp_path / "none"), "--to", str(tmp_path / "out")]) == 74


def test_a_new_job_starts_from_the_weights_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verl_step(tmp_path / "verl", 7, 4.0)
    config = str(Path(__file__).parents[2] / "data/importing/verl-megatron.yaml")
    job, step = tmp_path / "job.toml", str(tmp_path / "verl/global_step_7")
    assert run(["import", config, "--to", str(job), "--from-checkpoint", step]) == 0
    model = load_config(str(job)).model.path
    assert model == str(tmp_path / "job-start")
    assert json.loads((Path(model) / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    with safe_open(next(Path(model).glob("*.safetensors")), "pt") as file:
        for name, tensor in weights(4.0).items():
            assert torch.equal(file.get_tensor(name), tensor)
    assert run(["import", config, "--to", str(tmp_path / "b.toml"), "--from-checkpoint", str(tmp_path)]) == 2
    assert run(["import", config, "--from-checkpoint", step]) == 2
    (tmp_path / "verl/global_step_7/actor/model_world_size_1_rank_0.pt").write_bytes(b"torn")
    assert run(["import", config, "--to", str(tmp_path / "c.toml"), "--from-checkpoint", step]) == 65
    assert not (tmp_path / "c.toml").exists()
    capsys.readouterr()
