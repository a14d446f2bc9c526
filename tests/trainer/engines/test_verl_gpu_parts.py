"""What runs on GPUs alone, on processors: FSDP1, and Ulysses around flash attention's formula."""

import pytest
from support import case_runs, samples
from support.case_runs import assert_close
from support.matrices import LONG
from support.verl_release import LACKS

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [
    pytest.mark.group("engines"),
    pytest.mark.slow,
    pytest.mark.timeout(3 * case_runs.LONG),
    LONG,
    pytest.mark.skipif(LACKS.whole_value_loss, reason="this release has no critic"),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    samples.make_model(models / "untied", tied=False, tokenizer=True)
    place = tmp_path_factory.mktemp("gpu-parts")
    names = ("expected_gradients", "attentions", "fsdp1", "split_rows")
    return case_runs.run_cases(place, "verl", models, 2, *names)


def metrics_of(found):
    return {name: value for name, value in found.items() if not name.startswith("timing_s/")}


def same_metrics(found, expected):
    assert metrics_of(found) == pytest.approx(metrics_of(expected), rel=1e-4, abs=1e-6)


def test_every_attention_learns_the_same_padded_and_packed(two):
    for found in two["attentions"]:
        assert len(found) == 4
        for metrics in found.values():
            same_metrics(metrics, found["padded sdpa"])


def resumed(found):
    """Assert that a run went on bit for bit from what it had saved."""
    assert [metrics_of(one) for one in found["again"]] == [metrics_of(one) for one in found["metrics"][2:]]
    assert all(torch.equal(found["end"][name], found["end again"][name]) for name in found["end"])
    assert set(found["files"].values()) == {True}


def test_fsdp1_trains_exports_saves_and_resumes_as_fsdp2_does(two):
    for found in two["fsdp1"]:
        first, second = found["contract", "fsdp"], found["contract", "fsdp2"]
        resumed(first)
        assert first["files"].keys() == second["files"].keys()
        for one, other in zip(first["metrics"], second["metrics"], strict=True):
            same_metrics(one, other)
        for moment in ("start", "saved", "end"):
            assert_close(first[moment], second[moment])
        same_metrics(found["ppo", "fsdp"], found["ppo", "fsdp2"])


def test_gradients_of_rows_that_ranks_share_match_the_formula(two):
    expected = two["expected_gradients"][0]
    for found in two["split_rows"]:
        for (name, _), (gradients, metrics) in found["gradients"].items():
            same_metrics(metrics, found["gradients"][name, None][1])
            assert_close(gradients, expected[name])


def test_steps_are_the_same_whether_ranks_share_rows_or_not(two):
    for found in two["split_rows"]:
        alone, shared = found["contract", 1], found["contract", 2]
        resumed(shared)
        for one, other in zip(shared["metrics"], alone["metrics"], strict=True):
            same_metrics(one, other)
        for moment in ("start", "saved", "end"):
            assert_close(shared[moment], alone[moment], 1e-4)
        for row, its in zip(shared["token_logprobs"], alone["token_logprobs"], strict=True):
            assert row == pytest.approx(its, abs=1e-4)


def test_a_critic_and_an_adapter_learn_the_same_whether_ranks_share_rows_or_not(two):
    for found in two["split_rows"]:
        alone, shared = found["ppo", 1], found["ppo", 2]
        for row, its in zip(shared["values"], alone["values"], strict=True):
            torch.testing.assert_close(row, its, rtol=0, atol=1e-5)
        same_metrics(shared["metrics"], alone["metrics"])
        for model in ("actor", "critic"):
            assert_close(shared[model], alone[model], 1e-4)
        same_metrics(found["lora", 2], found["lora", 1])


def test_an_attention_that_sees_a_part_of_a_row_alone_is_refused(two):
    for found in two["split_rows"]:
        kind, message, hint = found["blind"]
        assert kind == "ConfigError"
        assert "alone, the model's log_probs differ by" in message
        assert "model.attn_implementation" in hint
