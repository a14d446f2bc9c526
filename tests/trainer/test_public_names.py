"""The names that users of Trinity-RFT's trainer know, imported from `trainer`."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

import torch.distributed as dist  # noqa: E402
from support import trainers  # noqa: E402

import trainer  # noqa: E402
from syncd.errors import ConfigError, CorruptDataError  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from trainer.engines.base import TrainEngineWrapper  # noqa: E402


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(trainers.INSTALLED)
    directory = tmp_path / "job"
    directory.mkdir()
    yield trainers.small_config(directory)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_each_public_name_resolves_and_an_unknown_one_raises():
    for name in ("Trainer", "TrainEngineWrapper", "get_trainer_wrapper", "get_latest_hf_checkpoint_path"):
        assert getattr(trainer, name).__name__ == name
    assert {"SAMPLE_STRATEGY", "load_plugins", "Trainer"} <= set(dir(trainer))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trainer.nothing  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_the_loop():
    code = "import sys, trainer; print([name for name in ('torch', 'trainer.loop') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_wrapper_opens_the_configured_engine_at_step_0(config):
    wrapper = trainer.get_trainer_wrapper(config)
    assert isinstance(wrapper, TrainEngineWrapper)
    wrapper.prepare()
    assert wrapper.train_step_num == 0
    wrapper.shutdown()


def test_a_second_wrapper_reuses_the_process_group(config):
    trainer.get_trainer_wrapper(config)
    assert dist.is_initialized()
    assert isinstance(trainer.get_trainer_wrapper(config), TrainEngineWrapper)


def test_a_wrapper_of_an_unknown_engine_is_refused(config):
    unknown = config.model_copy(update={"engine": config.engine.model_copy(update={"name": "none-such"})})
    with pytest.raises(ConfigError, match="none-such"):
        trainer.get_trainer_wrapper(unknown)


def test_the_latest_checkpoint_path_prefers_the_huggingface_directory(config):
    job = Job.at(config.job.dir)
    assert trainer.get_latest_hf_checkpoint_path(config) is None
    job.disk.make_directory(f"{job.step(3)}/actor")
    job.disk.replace(f"{job.step(3)}/.full_checkpoint", b"{}")
    job.disk.replace(job.tracker, b"3")
    assert trainer.get_latest_hf_checkpoint_path(config) == f"{job.step(3)}/actor"
    job.disk.make_directory(f"{job.step(3)}/actor/huggingface")
    assert trainer.get_latest_hf_checkpoint_path(config) == f"{job.step(3)}/actor/huggingface"


def test_a_step_without_the_full_checkpoint_file_is_no_checkpoint(config):
    job = Job.at(config.job.dir)
    job.disk.make_directory(f"{job.step(3)}/actor")
    job.disk.replace(job.tracker, b"3")
    assert trainer.get_latest_hf_checkpoint_path(config) is None


def test_a_damaged_tracker_is_an_error(config):
    job = Job.at(config.job.dir)
    job.disk.replace(job.tracker, b"three")
    with pytest.raises(CorruptDataError, match="not the number of a step"):
        trainer.get_latest_hf_checkpoint_path(config)
