"""The strategy `megatron` on GPUs: Transformer Engine, NCCL, bfloat16. Run by `make test-gpu`, else skipped."""

import importlib.util
import math

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
for package in ("megatron", "mbridge", "transformer_engine"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from support import case_runs, samples  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("megatron")
    samples.make_model(found / "even", tied=False, tokenizer=True, vocab=64)
    return found


@pytest.fixture(scope="module")
def found(place):
    ranks = min(2, torch.cuda.device_count())
    return case_runs.run_cases(place, "verl", place, ranks, "split_on_gpus", device="cuda")


def test_weights_go_out_by_their_hugging_face_names(found, place):
    expected = load_file(place / "even/model.safetensors")
    for rank in found["split_on_gpus"]:
        assert rank["start"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(rank["start"][name].cpu(), tensor.bfloat16()), name


def test_it_learns_and_a_resume_goes_on_as_before(found):
    for rank in found["split_on_gpus"]:
        assert all(math.isfinite(value) for metrics in rank["metrics"] for value in metrics.values())
        assert rank["metrics"][-1]["sft/loss"] < rank["metrics"][0]["sft/loss"]
        for metrics, again in zip(rank["metrics"][2:], rank["again"], strict=True):
            assert again == pytest.approx(metrics, rel=1e-2, abs=1e-3)
