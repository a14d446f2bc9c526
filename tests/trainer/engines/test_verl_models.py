"""What transformers and torch say of a model that they cannot build becomes one refusal with a hint."""

import pickle

import pytest
from support.needed import need

torch = pytest.importorskip("torch", reason="the trainer needs torch")
need("verl", "the engine is verl's")

from syncd.errors import ConfigError  # noqa: E402
from trainer.engines.verl.refusals import refusals  # noqa: E402

pytestmark = pytest.mark.group("engines")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ValueError("it does not recognize this architecture.\nmore"), "pip install --upgrade transformers"),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), "hf download"),
        (pickle.UnpicklingError("invalid load key"), "hf download"),
        (OSError(22, "Invalid argument"), "hf download"),
    ],
)
def test_a_model_that_cannot_be_built_is_a_fault_of_the_file(error, hint):
    with pytest.raises(ConfigError, match="the model cannot be built") as caught, refusals("/models/a b"):
        raise error
    assert caught.value.exit_code == 78
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[/pytorch/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ],
)
def test_what_is_no_fault_of_the_model_stays_what_it_is(error):
    with pytest.raises(type(error)) as caught, refusals("/models/m"):
        raise error
    assert caught.value is error


@pytest.mark.filterwarnings("ignore:.* engine is not available:UserWarning")
@pytest.mark.filterwarnings("ignore:NPU not support")  # verl 0.8, at its import
def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path):
    from support.stand_ins import leave_model

    from syncd.jobfile.model import JobFile
    from trainer.engines.verl.models import build_model

    path = leave_model(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"architectures": ["New"], "model_type": "new"}')
    config = JobFile.model_validate({"job": {"dir": str(tmp_path)}, "model": {"path": path}})
    with pytest.raises(ConfigError, match="model type `new`"):
        build_model(config, "cpu")
