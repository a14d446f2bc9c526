"""PPO with a critic computes what plain torch computes, on one rank and on two, and both models resume together."""

import math
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
from support.verl_release import LACKS  # noqa: E402

from syncd.errors import NotReadyError, UsageError  # noqa: E402
from trainer.export import export  # noqa: E402

pytestmark = [
    pytest.mark.group("engines"),
    pytest.mark.slow,
    pytest.mark.skipif(
        LACKS.whole_value_loss, reason="this release of verl has no value loss of whole updates"
    ),
]


@pytest.fixture(scope="module")
def runs(one, two):
    """What each rank of one and of two found in a step of PPO, for each way to divide the rows."""
    return [step for steps in (*one["ppo_steps"], *two["ppo_steps"]) for step in steps.values()]


def test_values_are_those_of_transformers(one, runs):
    (expected,) = one["ppo_by_hand"]
    for found in runs:
        for values, its in zip(found["values"], expected["values"], strict=True):
            torch.testing.assert_close(values, its, rtol=0, atol=1e-6)


def test_the_losses_and_gradient_norms_of_a_step_match_plain_torch(one, runs):
    (expected,) = one["ppo_by_hand"]
    for found in runs:
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0 < expected["metrics"]["critic/vf_clipfrac"] < 0.5, "the clip was met"


@pytest.mark.parametrize("model", ["critic", "actor"])
def test_the_weights_after_a_step_match_plain_torch(one, runs, model):
    """The critic has made four updates, each of which enlarges rounding; the actor has made one."""
    (expected,), tolerance = one["ppo_by_hand"], {"critic": 3e-4, "actor": 1e-5}[model]
    for found in runs:
        before, after = (found[f"{model} {when}"] for when in ("before", "after"))
        assert set(after) == set(expected[f"{model} after"])
        for name, its in expected[f"{model} after"].items():
            moved, should = after[name] - before[name], its.detach() - before[name]
            assert (moved - should).norm() <= tolerance * should.norm(), name


def test_gae_counts_a_rollout_of_several_segments_as_one_row(one):
    (found,) = one["gae_of_segments"]
    for ours, expected in zip(found["found"], found["expected"], strict=True):
        for row, its in zip(ours, expected, strict=True):
            assert row.tolist() == pytest.approx(its, abs=1e-6)


def test_the_explained_variance_is_unknown_where_all_returns_are_the_same(one):
    (found,) = one["gae_of_segments"]
    assert found["metrics"]["critic/vf_explained_var"] < 1
    assert math.isnan(found["same"]["critic/vf_explained_var"])
    assert found["same"]["critic/returns/mean"] == 1


def test_actor_and_critic_resume_bit_for_bit(one, two):
    for found in (*one["ppo_resumed"], *two["ppo_resumed"]):
        assert found["files"]
        assert all(found["files"].values()), found["files"]
        assert len([name for name in found["files"] if name.startswith("critic/model_world")]) >= 1
        for straight, again in zip(found["metrics"][1:], found["again"], strict=True):
            assert without_times(straight) == without_times(again)


def test_one_rank_resumes_the_critic_of_two(one, two):
    (found,), expected = one["ppo_of_two_ranks"], two["ppo_resumed"][0]
    for name in ("critic end", "moments"):
        assert found[name].keys() == expected[name].keys()
        assert all(torch.equal(value, expected[name][key]) for key, value in found[name].items())
    for name in ("critic/vf_loss", "critic/values/mean", "critic/grad_norm", "actor/grad_norm"):
        assert found["next"][name] == pytest.approx(expected["next"][name], rel=1e-3, abs=1e-6)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}


def test_only_the_critic_learns_in_its_warm_up(one, two):
    for found in (*one["ppo_resumed"], *two["ppo_resumed"]):
        assert found["actor moved"] == [False, True]
        first, second = found["metrics"][:2]
        assert set(first) <= set(second)
        assert first["actor/grad_norm"] == 0 < first["critic/grad_norm"]
        assert second["actor/grad_norm"] > 0


def test_a_state_without_its_critic_is_refused(one, two):
    for found in (*one["ppo_resumed"], *two["ppo_resumed"]):
        kind, message, _ = found["without"]
        assert kind == "CorruptDataError"
        assert "critic/model_world_size_" in message


def test_a_critic_learns_the_values_of_a_batch(one):
    (found,) = one["ppo_learns"]
    first, last = found[0], found[-1]
    assert last["critic/vf_loss"] < 0.2 * first["critic/vf_loss"]
    assert last["critic/vf_explained_var"] > 0.5 > first["critic/vf_explained_var"]


def test_a_model_that_cannot_be_the_critic_is_refused(one):
    (found,) = one["small_critic"]
    assert "a critic of 40 tokens for a policy of 61" in found["Llama"][1]
    assert 'no decoder with a number for each token of the model type "gpt2"' in found["GPT2"][1]
    assert "it has no tensor model.layers.1.mlp.up_proj.weight" in found["lacking"][1]


@pytest.mark.parametrize("layout", ["ours", "verl's"])
def test_an_exported_critic_loads_as_a_token_classification(two, two_ranks, tmp_path, layout):
    transformers = pytest.importorskip("transformers")
    step, state = tmp_path / "global_step_3", f"{two_ranks('verl')[1]}/ppo-straight-2"
    if layout == "ours":
        shutil.copytree(state, step / "training")
        with pytest.raises(NotReadyError):
            export(str(tmp_path), 3, str(tmp_path / "out"), critic=True)
        (step / ".full_checkpoint").touch()
    else:
        shutil.copytree(f"{state}/critic", step / "critic")
    export(str(tmp_path), 3, str(tmp_path / "out"), critic=True)
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    expected = two["ppo_resumed"][0]["critic end"]
    assert type(model).__name__ == "LlamaForTokenClassification"
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size


def test_a_step_without_a_critic_exports_none(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    with pytest.raises(UsageError, match="step 3 holds no critic"):
        export(str(tmp_path), 3, str(tmp_path / "out"), critic=True)
