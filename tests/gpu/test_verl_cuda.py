"""The verl engine on GPUs: NCCL, bfloat16, sdpa, FSDP2 and FSDP. `make test-gpu` runs it; elsewhere it is skipped."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from support import case_runs, samples  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    models, place = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("cuda")
    samples.make_model(models / "untied", tied=False)
    samples.make_model(models / "tied", tied=True)
    ranks = min(2, torch.cuda.device_count())
    names = ("contract", "on_gpus", "ppo_on_gpus", "platform", "no_ray")
    return case_runs.run_cases(place, "verl", models, ranks, *names, device="cuda")


def test_training_on_gpus_is_finite_and_resumes_from_a_checkpoint(found):
    for one in found["contract"]:
        assert (one["fresh"], one["steps"]) == (0, 4)
        assert all(math.isfinite(value) for metrics in one["metrics"] for value in metrics.values())
        for name, tensor in one["end"].items():
            torch.testing.assert_close(tensor, one["end again"][name], rtol=1e-2, atol=1e-3)


def test_every_strategy_and_offload_setting_reduces_the_sft_loss(found):
    for one in found["on_gpus"]:
        for name, (start, end) in one.items():
            assert end["sft/loss"] < start["sft/loss"], name
            assert all(map(math.isfinite, end.values())), name


def test_a_critic_learns_with_every_strategy_and_offload_setting(found):
    for one in found["ppo_on_gpus"]:
        for name, metrics in one.items():
            assert metrics[-1]["critic/vf_loss"] < 0.5 * metrics[0]["critic/vf_loss"], name
            assert all(math.isfinite(value) for step in metrics for value in step.values()), name


def test_verl_selects_cuda_and_nccl(found):
    assert set(found["platform"]) == {'["cuda", "nccl"]'}


def test_ray_is_never_started(found):
    assert not any(running for running, _ in found["no_ray"])
