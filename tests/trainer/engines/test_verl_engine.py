"""verl's engine computes what its formulas say, however rows are dealt, and says what it cannot do."""

import json
import math
import os

import pytest
from support import samples
from support.case_runs import assert_close
from support.verl_release import LACKS

from syncd.jobfile.model import JobFile
from trainer.config.known_figures import metric_problems
from trainer.engines.verl.figures import MISMATCH, OF_ROLLOUTS

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [pytest.mark.group("engines"), pytest.mark.slow]

OF_A_STEP = (
    "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac", "rollout_corr/ess_token",
    "rollout_corr/ess_seq", "rollout_corr/rollout_is_mean", *MISMATCH, *OF_ROLLOUTS,
)  # fmt: skip


def test_gradients_match_the_formula(one):
    (found,), (expected,) = one["same_gradients"], one["expected_gradients"]
    assert set(expected) == {"token-mean", "entropy", "sft", "mixed"}
    for name, gradients in expected.items():
        assert_close(found[name, "eight"][0], gradients)


def test_the_passes_of_a_step_are_measured(two):
    for rank in two["contract"]:
        assert rank["times"].keys() == {
            f"timing_s/{name}"
            for name in ("update_actor", "forward", "backward", "optimizer", "old_log_prob")
        }
        assert all(seconds > 0 for seconds in rank["times"].values())


def test_a_rollout_of_several_segments_counts_once(one, two):
    """Its reward is in its group once, its tokens are learnt together, and unproven ones are not."""
    (expected,), (alone,) = one["expected_segments"], one["segments"]
    for mode, gradients in expected.items():
        assert_close(alone[mode][0], gradients)
        for together in two["segments"]:
            assert_close(together[mode][0], gradients)
    batch, (_, metrics) = samples.segmented_batch(7), alone["token-mean"]
    rewards = [row.reward for row in batch.experiences if row.segment == 0]
    assert len(rewards) == 6
    assert metrics["critic/score/mean"] == pytest.approx(sum(rewards) / 6)
    assert metrics["train/tokens"] == sum(sum(row.learnt) for row in batch.experiences)
    assert metrics["train/tokens"] < sum(sum(row.action_mask) for row in batch.experiences)


def test_a_rollout_is_learnt_the_same_however_it_is_cut(one, two):
    """One row a rollout, and up to three of other micro-batches and ranks: the same gradients and figures."""
    for algorithm, ((whole, figures), _) in one["pieces"][0].items():
        for found in (*one["pieces"], *two["pieces"]):
            for gradients, metrics in found[algorithm]:
                assert_close(gradients, whole)
                for name in OF_A_STEP:
                    expected = pytest.approx(figures.get(name, 0.0), rel=1e-4, abs=1e-6)
                    assert metrics.get(name, 0.0) == expected, name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("directory", [".", "huggingface"])
def test_transformers_loads_a_saved_step_with_the_trained_log_probs(two, dtype, tolerance, directory):
    transformers = pytest.importorskip("transformers")
    path, expected = two["published"][0][dtype]
    place = os.path.join(path, directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(place).vocab_size
    assert model.config.dtype == torch.float32
    for row, wanted in zip(samples.batch_of(9).experiences, expected, strict=True):
        tokens = torch.tensor([list(row.tokens)])
        with torch.no_grad():
            found = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(found[row.prompt_length - 1 :], wanted, rtol=0, atol=tolerance)


def test_gradients_are_independent_of_ranks_and_micro_batches(one, two):
    (alone,) = one["same_gradients"]
    assert len(alone) == 35
    for together in two["same_gradients"]:
        for (name, budget), (gradients, _) in together.items():
            assert_close(gradients, alone[name, "eight"][0])
            assert_close(alone[name, budget][0], alone[name, "eight"][0])


def test_metrics_are_independent_of_ranks_and_micro_batches(one, two):
    (alone,) = one["same_gradients"]
    for together in two["same_gradients"]:
        for (name, budget), (_, metrics) in together.items():
            assert metrics == pytest.approx(alone[name, "eight"][1], rel=1e-4, abs=1e-6), (name, budget)


def test_metrics_describe_the_batch(one):
    metrics = one["same_gradients"][0]["mixed", "three"][1]
    assert 0 <= metrics["critic/score/min"] < metrics["critic/score/mean"] < metrics["critic/score/max"] <= 1
    assert 0.1 < metrics["rollout_corr/logprob_diff_mean"] < metrics["rollout_corr/logprob_diff_max"] < 2
    assert metrics["actor/entropy"] == pytest.approx(math.log(61), rel=0.01)
    assert metrics["sft/loss"] == pytest.approx(math.log(61), rel=0.1)
    assert metrics["train/tokens"] < metrics["response/tokens"] + 30


def test_several_updates_per_step_give_the_same_metrics_on_one_and_two_ranks(one, two):
    (alone,) = one["many_updates"]
    for metrics in two["many_updates"]:
        for step, its in zip(metrics, alone, strict=True):
            assert step == pytest.approx(its, rel=0.02, abs=1e-4)
    first, second = alone
    assert 1e-6 < first["actor/kl_loss"] < 1
    assert first["actor/ppo_kl"] > 0.1
    assert first["actor/lr"] > second["actor/lr"] > 0


def test_training_learns_from_examples_and_from_rewards(one):
    (found,) = one["learns"]
    assert found["examples"][-1] < 0.5 * found["examples"][0]
    best = max(range(4), key=found["rewards"].__getitem__)
    worst = min(range(4), key=found["rewards"].__getitem__)
    assert found["gained"][best] > 0.5 > -0.5 > found["gained"][worst]


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_log_probs_match_transformers_before_and_after_training(one, model):
    (found,) = one["plain_log_probs"]
    for when in ("fresh", "trained"):
        ours, plain, dtype = found[model, when]
        assert dtype == "torch.float32"
        for row, its in zip(ours, plain, strict=True):
            torch.testing.assert_close(row, its, rtol=0, atol=1e-5)
    assert not torch.equal(found[model, "fresh"][0][0], found[model, "trained"][0][0])


def test_an_export_has_the_model_s_names_and_reports_tied_ones(one):
    (found,) = one["plain_log_probs"]
    for model, tied in (("untied", []), ("tied", ["lm_head.weight"])):
        exported, names, repeated = found[model, "names"]
        assert exported == names
        assert repeated == tied


def test_companion_files_are_the_config_and_the_tokenizer_if_there_is_one(one):
    (found,) = one["plain_log_probs"]
    assert set(found["untied", "files"]) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert set(found["tied", "files"]) == {"config.json", "generation_config.json"}
    assert found["tokenizer"] == [3, 9]
    config = json.loads(found["tied", "files"]["config.json"])
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_every_algorithm_estimator_and_loss_completes_a_step(one):
    (found,) = one["every_algorithm"]
    assert len(found) >= 30
    for way, metrics in found:
        assert all(map(math.isfinite, metrics.values())), way
        assert 1e-3 < metrics["actor/grad_norm"] < 100, way


def test_an_update_that_is_not_finite_is_skipped_and_the_tenth_in_a_row_raises(one):
    (found,) = one["not_finite"]
    assert found["same"]
    assert found["skipped"]["actor/updates_skipped"] == 1
    assert math.isnan(found["skipped"]["actor/grad_norm"])
    assert found["after"]["actor/updates_skipped"] == 0
    assert found["after"]["actor/lr"] == found["skipped"]["actor/lr"]
    assert found["refused"][:9] == [None] * 9
    kind, message, hint = found["refused"][9]
    assert (kind, "not finite" in message, "lr" in hint) == ("CorruptDataError", True, True)


def test_a_bfloat16_engine_keeps_float32_parameters(one):
    ((metrics, dtypes),) = one["halves"]
    assert all(map(math.isfinite, metrics.values()))
    assert dtypes == {"torch.float32"}


REFUSALS = {
    "fsdp on processors": ("fsdp does not run on processors", "fsdp2"),
    "flash attention on processors": (
        "flash_attention_2 does not run on processors",
        'model.attn_implementation = "sdpa"',
    ),
    "strategy": ('engine.strategy = "fsdp3" is not one of', "did you mean fsdp"),
    "algorithm": ('algorithm.name = "grop" is not one of', "did you mean grpo"),
    "no critic": ('algorithm.advantage = "gae" needs a critic', "critic.enabled = true"),
    "critic of another estimator": (
        "critic.enabled has no effect with the estimator grpo",
        'algorithm.name = "ppo"',
    ),
    "critic that does not exist": (
        "not a model directory: No such file or directory: /nowhere",
        "critic.path is a",
    ),
    "baseline": ('"remax" is not supported: it needs the reward of a greedy rollout', "rloo"),
    "estimator": ('"grpoo"', "did you mean grpo"),
    "loss": ('"vanila"', "did you mean vanilla"),
    "mean of a micro-batch": ("depend on how rows are split", "gspo"),
    "another loss of bypassed updates": ("old_logprobs", "vanilla"),
    "dro": ("dro needs a penalty", "dro_beta"),
    "aggregation": ('algorithm.loss_agg_mode = "mean" is not one of seq-mean-token-mean, ', ""),
    "kl": ('algorithm.kl_type = "k9" is not one of abs, abs+, k1', ""),
    "engine option": (
        "verl has no engine.options.reshard_after_forwrad",
        "did you mean reshard_after_forward",
    ),
    "engine option elsewhere": ("engine.options.param_offload is not set here", "engine.offload_params"),
    "actor option": ("verl has no algorithm.options.clip_ratio_d", "did you mean clip_ratio_"),
    "loss option": ("verl has no algorithm.options.policy_loss.dro", "clip_ratio_c"),
    "cosine": ('schedule = "cosine" has no end', "trainer.total_steps"),
    "no directory": ("not a model directory: No such file or directory: /nowhere/model", "hf download"),
    "attention": ('the model cannot be built: Specified `attn_implementation="none"`', ""),
    "lacking": (
        "the model cannot be built: it has no tensor model.layers.1.mlp.up_proj.weight: ",
        "hf download ORG/MODEL --local-dir ",
    ),
    "reshaped": (
        "its tensor lm_head.weight has another shape than the model's: ",
        "hf download ORG/MODEL --local-dir ",
    ),
    "tokens": ("use_dynamic_bsz needs a bound", "max_token_len_per_gpu"),
    "vocabulary": ("token 61 in a batch for a model of 61 tokens", "tokenizer"),
    "empty": ("a batch with nothing to learn from", ""),
    "long row": ("a row of 12 tokens where 5 are one micro-batch", "max_token_len_per_gpu"),
    "alone": ("grpo_passk cannot take this batch", "data.group_size"),
    "packing": (
        "packed rows see each other: padded, the model's log_probs differ by",
        "engine.packing = false",
    ),
}


def test_unsupported_configurations_are_refused_with_a_hint(one):
    (found,) = one["refused"]
    assert found.keys() == REFUSALS.keys()
    told = dict(REFUSALS)
    if LACKS.whole_value_loss:
        told |= {"critic that does not exist": ("verl 0.8 has no value loss", "0.9")}
    for name, (message, hint) in told.items():
        kind, said, advice = found[name]
        assert kind in ("ConfigError", "CorruptDataError", "UsageError"), name
        assert message in said, name
        assert hint in advice, name


def test_verl_leaves_no_lock_files(two, two_ranks):
    found = os.listdir(f"{two_ranks('verl')[1]}/temporary")
    assert [name for name in found if name.endswith(".lock")] == []


def test_files_of_the_training_state_hold_what_verl_itself_writes(two):
    for rank, same_as_verl in enumerate(two["as_verl_saves"]):
        names = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("extra_state", "model", "optim")]
        assert same_as_verl == dict.fromkeys(sorted(same_as_verl), True)
        assert sorted(same_as_verl) == names


def test_ray_is_never_started(one, two):
    assert one["no_ray"] == [(False, [])]
    assert two["no_ray"] == [(False, [])] * 2


def test_verl_finds_the_cpu_platform_and_does_not_warn_of_it(one, two):
    # A release without platforms names the backend of GPUs, and is not asked for one.
    assert two["platform"] == ['["cpu", "nccl"]' if LACKS.platforms else '["cpu", "gloo"]'] * 2
    lines = [line for said in two["said"] for line in said.splitlines()]
    assert [line for line in lines if "platform" in line.lower() or "accelerator" in line.lower()] == []


def test_kl_in_the_reward_is_that_from_the_start_model_and_the_same_on_two_ranks(one, two):
    (alone,) = one["reward_kl"]
    batch, means = samples.batch_of(3), []
    for row, now, start in zip(batch.experiences, alone["before"], alone["start"], strict=True):
        learnt = [place for place, its in enumerate(row.learnt) if its]
        apart = [float(start[place] - now[place]) for place in learnt]
        kl = [math.exp(one) - one - 1 for one in apart]
        means.append(sum(kl) / max(len(kl), 1))
    kls = [metrics["actor/reward_kl_penalty"] for metrics in alone["metrics"]]
    assert kls[0] == pytest.approx(0, abs=1e-9)  # the model is the start model
    assert kls[2] == pytest.approx(sum(means) / len(means), rel=1e-3)
    assert kls[2] > 1e-4
    assert "actor/kl_loss" not in alone["metrics"][2]
    for together in two["reward_kl"]:
        assert together["metrics"] == [pytest.approx(its, rel=0.02, abs=1e-4) for its in alone["metrics"]]
        assert_close(together["gradients"], alone["gradients"])


def test_kl_in_the_reward_takes_nothing_of_rollouts_of_which_nothing_is_learnt(one, two):
    (alone,) = one["unlearnt_part"]
    whole, half = alone
    assert 0 < half["train/tokens"] < whole["train/tokens"]
    assert half["actor/reward_kl_penalty"] > whole["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-9)
    for together in two["unlearnt_part"]:
        assert together == [pytest.approx(its, rel=0.02, abs=1e-4) for its in alone]


def test_a_linear_rate_falls_in_a_straight_line_to_0(one):
    (alone,) = one["reward_kl"]
    rates = [metrics["actor/lr"] for metrics in alone["metrics"]]
    assert rates == pytest.approx([0, 1e-2, 0.5e-2])


def test_selection_may_name_every_figure_of_a_step(one):
    algorithm = {"name": "rloo", "reward_kl_coef": 0.2, "kl_coef": 0.1}
    table = {"job": {"dir": "/job"}, "model": {"path": "/model"}, "algorithm": algorithm}
    for name in {name for case in ("reward_kl", "many_updates") for name in _figures(one[case][0])}:
        config = JobFile.model_validate(table | {"selection": {"metric": name}})
        assert not list(metric_problems(config)), name


def _figures(found):
    steps = found["metrics"] if isinstance(found, dict) else found
    return {name for metrics in steps for name in metrics}
