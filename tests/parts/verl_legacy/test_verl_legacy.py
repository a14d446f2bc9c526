"""The engine `verl_legacy`: gradients and log-probs against transformers, and what it says it cannot do.

What computes needs verl 0.7.1: `make test-verl-legacy`.
"""

import math

import pytest
from support import samples
from support.case_runs import assert_close
from support.verl_release import IS_LEGACY

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from syncd.errors import ConfigError  # noqa: E402
from trainer.parts.verl_legacy import checks  # noqa: E402

with_legacy = pytest.mark.skipif(not IS_LEGACY, reason="needs verl 0.7.1: make test-verl-legacy")


RUNS = "verl_legacy"
"""The engine of the fixtures `one` and `two`."""


@with_legacy
@pytest.mark.slow
def test_gradients_match_the_formula(one):
    (found,), (expected,) = one["legacy_gradients"], one["legacy_expected"]
    assert set(expected) == {"token-mean", "sequences", "sft"}
    for name, gradients in expected.items():
        assert_close(found[name, 8][0], gradients)


@with_legacy
@pytest.mark.slow
def test_gradients_and_metrics_are_independent_of_ranks_and_micro_batches(one, two):
    (alone,) = one["legacy_gradients"]
    for found in (alone, *two["legacy_gradients"]):
        for (name, size), (gradients, metrics) in found.items():
            assert_close(gradients, alone[name, 8][0])
            assert metrics == pytest.approx(alone[name, 8][1], rel=1e-4, abs=1e-6), (name, size)


@with_legacy
@pytest.mark.slow
def test_every_algorithm_completes_a_step_whose_gradient_is_independent_of_micro_batches(one):
    (found,) = one["legacy_every_algorithm"]
    names = {name for name, _ in found}
    assert len(names) >= 14
    for name in names:
        (gradients, metrics), (other, _) = found[name, 8], found[name, 3]
        assert all(map(math.isfinite, metrics.values())), name
        assert 1e-3 < metrics["actor/grad_norm"] < 100, name
        if not name.endswith("_cov"):  # they choose tokens within a micro-batch
            assert_close(other, gradients)


@with_legacy
@pytest.mark.slow
def test_a_step_on_recorded_log_probs_does_not_claim_a_difference_that_it_does_not_measure(one):
    (found,) = one["legacy_gradients"]
    assert "rollout_corr/logprob_diff_mean" in found["token-mean", 8][1]
    assert (
        not {"rollout_corr/logprob_diff_mean", "rollout_corr/logprob_diff_max"}
        & found["rollout", 8][1].keys()
    )


@with_legacy
@pytest.mark.slow
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_log_probs_match_transformers_before_and_after_training(one, model):
    (found,) = one["legacy_log_probs"]
    for when in ("fresh", "trained"):
        ours, plain, dtype = found[model, when]
        assert dtype == "torch.float32"
        for row, its in zip(ours, plain, strict=True):
            torch.testing.assert_close(row, its, rtol=0, atol=1e-5)
    assert not torch.equal(found[model, "fresh"][0][0], found[model, "trained"][0][0])


@with_legacy
@pytest.mark.slow
def test_an_export_is_float32_with_the_model_s_names_and_reports_tied_ones(one):
    (found,) = one["legacy_log_probs"]
    for model, tied in (("untied", []), ("tied", ["lm_head.weight"])):
        exported, names, repeated, dtypes = found[model, "names"]
        assert (exported, repeated, dtypes) == (names, tied, {"torch.float32"})


@with_legacy
@pytest.mark.slow
def test_transformers_loads_a_saved_step_with_the_trained_log_probs(two):
    transformers = pytest.importorskip("transformers")
    path, expected = two["published"][0]["float32"]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for row, wanted in zip(samples.batch_of(9).experiences, expected, strict=True):
        tokens = torch.tensor([list(row.tokens)])
        with torch.no_grad():
            found = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(found[row.prompt_length - 1 :], wanted, rtol=0, atol=1e-5)


@with_legacy
@pytest.mark.slow
def test_training_learns_from_examples_and_in_bfloat16_from_rewards(one):
    (found,) = one["legacy_learns"]
    losses = [step["sft/loss"] for step in found["examples"]]
    assert losses[0] == pytest.approx(math.log(samples.VOCAB), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert found["dtypes"] == {"torch.float32"}
    best = max(range(4), key=found["rewards"].__getitem__)
    worst = min(range(4), key=found["rewards"].__getitem__)
    assert found["gained"][best] > 0.5 > -0.5 > found["gained"][worst]
    rates = [step["actor/lr"] for step in found["steps"]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0


@with_legacy
@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_and_the_tenth_in_a_row_raises(one):
    (found,) = one["not_finite"]
    assert found["same"]
    assert found["skipped"]["actor/updates_skipped"] == 1
    assert found["after"]["actor/lr"] == found["skipped"]["actor/lr"]
    assert found["refused"][:9] == [None] * 9
    kind, message, hint = found["refused"][9]
    assert (kind, "not finite" in message, "lr" in hint) == ("CorruptDataError", True, True)


@with_legacy
@pytest.mark.slow
def test_asking_for_log_probs_disturbs_nothing(one):
    (found,) = one["undisturbed"]
    (metrics, weights, draw), asked = found["found"]
    assert (metrics, draw) == (asked[0], asked[2])
    assert all(torch.equal(weights[name], asked[1][name]) for name in weights)
    assert set(found["same"].values()) == {True}


REFUSALS = {
    "attention": ("the model cannot be built", ""),
    "no directory": ("not a model directory", "hf download"),
    "lacking": ("it has no tensor model.layers.1.mlp.up_proj.weight", ""),
    "rotary": ("transformers 4 does not read rope_parameters", '"rope_theta": 500000.0'),
    "mixed": ("rollouts or examples, not both", "data.sft_ratio = 0"),
    "vocabulary": ("token 61 in a batch for a model of 61 tokens", "tokenizer"),
    "empty": ("a batch with nothing to learn from", ""),
}


@with_legacy
@pytest.mark.slow
def test_models_and_batches_that_it_cannot_take_are_refused_with_a_hint(one):
    (found,) = one["legacy_refused"]
    assert found.keys() == REFUSALS.keys()
    for name, (message, hint) in REFUSALS.items():
        kind, said, advice = found[name]
        assert kind in ("ConfigError", "CorruptDataError", "UsageError"), name
        assert message in said, (name, said)
        assert hint in advice, name


@with_legacy
@pytest.mark.slow
def test_ray_is_never_started(one, two):
    assert one["no_ray"] == [(False, [])]
    assert two["no_ray"] == [(False, [])] * 2


@pytest.fixture
def installed(monkeypatch):
    """Have verl 0.7.1 installed, for all who ask by the packages' records."""
    monkeypatch.setattr(checks, "version", {"verl": "0.7.1"}.__getitem__)


OTHERS = {
    "engine.strategy": {"engine": {"strategy": "fsdp"}},
    "engine.offload_params": {"engine": {"offload_params": True}},
    "engine.offload_optimizer": {"engine": {"offload_optimizer": True}},
    "engine.options": {"engine": {"options": {"reshard_after_forward": False}}},
    "data.sft_ratio": {"data": {"sft_ratio": 0.1}},
    "algorithm.entropy_coeff": {"algorithm": {"entropy_coeff": 0.1}},
    "algorithm.kl_coef": {"algorithm": {"kl_coef": 0.1}},
    "algorithm.options.policy_loss.rollout_correction": {
        "algorithm": {"options": {"policy_loss": {"rollout_correction": {"rollout_is": "token"}}}}
    },
    "algorithm.options.calculate_entropy": {
        "algorithm": {"old_logprobs": "rollout", "options": {"calculate_entropy": True}}
    },
    "model.lora.rank": {"model": {"lora": {"rank": 4}}},
    "critic.enabled": {"algorithm": {"name": "ppo"}, "critic": {"enabled": True}},
    "algorithm.advantage": {"algorithm": {"advantage": "gae"}},
    "algorithm.loss": {"algorithm": {"loss": "dro", "options": {"policy_loss": {"dro_beta": 0.1}}}},
    "algorithm.loss_agg_mode": {"algorithm": {"loss_agg_mode": "token-sum"}},
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("key", OTHERS)
def test_what_only_the_engine_verl_has_is_refused_by_its_key(key):
    tables = OTHERS[key] | {"engine": {"name": "verl_legacy"} | OTHERS[key].get("engine", {})}
    with pytest.raises(ConfigError) as caught:
        checks.check(samples.configured("/nowhere", **tables))
    assert key.rpartition(".")[2] in str(caught.value)
    assert "verl" in f"{caught.value} {caught.value.hint}"


def test_another_release_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(checks, "version", {"verl": "0.9.1"}.__getitem__)
    with pytest.raises(
        ConfigError, match=r"verl 0\.9\.1 is installed; the engine verl_legacy runs 0\.7\.1"
    ) as caught:
        checks.check(samples.configured("/nowhere"))
    assert "[verl-legacy]" in caught.value.hint
