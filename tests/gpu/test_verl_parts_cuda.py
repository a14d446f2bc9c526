"""FSDP1, packed rows, flash attention and Ulysses on GPUs, by the cases that run on processors too.

Tolerances are those of bfloat16. `make test-gpu` runs it; elsewhere it is skipped.
"""

import importlib.util
import math

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from support import case_runs, samples  # noqa: E402

GPUS = torch.cuda.device_count()
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None,
    reason="flash attention is not installed: pip install flash-attn",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs one case on as many GPUs."""
    models = tmp_path_factory.mktemp("models")
    samples.make_model(models / "untied", tied=False, tokenizer=True)

    def run(case, ranks):
        return case_runs.run_cases(tmp_path_factory.mktemp(case), "verl", models, ranks, case, device="cuda")[
            case
        ]

    return run


def about_the_same(found, expected):
    """Assert that two steps learnt the same, as far as bfloat16 shows it."""
    assert all(map(math.isfinite, found.values()))
    for name in ("actor/grad_norm", "actor/entropy"):
        assert found[name] == pytest.approx(expected[name], rel=0.1), name


def resumed(found):
    """Assert that a run went on from what it had saved."""
    for name, tensor in found["end"].items():
        torch.testing.assert_close(tensor, found["end again"][name], rtol=1e-2, atol=1e-3)


def test_packed_rows_learn_what_padded_ones_do(run):
    for found in run("packings", min(2, GPUS)):
        about_the_same(found["packed sdpa"], found["padded sdpa"])


@needs_flash
def test_flash_attention_learns_what_sdpa_does_padded_and_packed(run):
    for found in run("attentions", min(2, GPUS)):
        for metrics in found.values():
            about_the_same(metrics, found["padded sdpa"])


def test_fsdp1_trains_exports_saves_and_resumes(run):
    for found in run("fsdp1", min(2, GPUS)):
        first, second = found["contract", "fsdp"], found["contract", "fsdp2"]
        resumed(first)
        assert first["end"].keys() == second["end"].keys()
        about_the_same(first["metrics"][0], second["metrics"][0])
        about_the_same(found["ppo", "fsdp"], found["ppo", "fsdp2"])


@needs_flash
@pytest.mark.skipif(GPUS < 2, reason="two ranks share a row, and each needs a GPU")
def test_rows_that_two_gpus_share_are_learnt_as_whole_ones_are(run):
    for found in run("split_rows", 2):
        resumed(found["contract", 2])
        about_the_same(found["contract", 2]["metrics"][0], found["contract", 1]["metrics"][0])
        about_the_same(found["ppo", 2]["metrics"], found["ppo", 1]["metrics"])
        about_the_same(found["lora", 2], found["lora", 1])
        assert "needs flash attention" in found["blind"][1]
