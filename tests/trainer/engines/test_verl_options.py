"""Every field of verl's tables is an option that changes something, or is refused with a reason."""

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support.verl_release import LACKS, USABLE_LOSSES  # noqa: E402

from syncd.jobfile.trainer_sections import AlgorithmSection, EngineSection  # noqa: E402
from trainer.config.algorithms import LOSSES, NORMALISED  # noqa: E402
from trainer.config.options import (  # noqa: E402
    OF_ALL,
    OF_ENGINE,
    OF_FSDP1,
    OF_LOSSES,
    algorithm_problems,
    engine_problems,
)

pytestmark = [pytest.mark.group("engines"), pytest.mark.slow]

MODES = {"loss_scale_factor": {"loss_agg_mode": "seq-mean-token-sum-norm"}}
MODES["calculate_entropy"] = {"old_logprobs": "rollout"}
VALUES = {
    "clip_ratio_c": 4.0, "calculate_entropy": True, "loss_scale_factor": 7, "use_dynamic_bsz": True,
    "max_token_len_per_gpu": 9, "infer_max_token_len_per_gpu": 9, "wrap_policy": {}, "fsdp_size": 2,
    "ulysses_sequence_parallel_size": 2, "policy_loss.rollout_correction.rollout_is": "token",
    "policy_loss.rollout_correction.rollout_is_threshold": "0.5_2.0",
}  # fmt: skip
"""A value of each option that is a flag or a number above 0 otherwise."""


def nested(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def accepted(loss):
    return LOSSES[loss].reads | {
        name for name in OF_ALL if LOSSES[loss].has_modes or name != "loss_scale_factor"
    }


@pytest.mark.parametrize("loss", USABLE_LOSSES)
def test_every_actor_field_is_used_or_refused(one, loss):
    names = one["fields"][0]["algorithm"]
    assert len(names) > 50
    assert accepted(loss) <= names, "verl has all that is accepted"
    for name in names:
        value = VALUES.get(name, 0.5)
        options = nested(name, value)
        if loss == "dro" and name != "policy_loss.dro_beta":
            options.setdefault("policy_loss", {})["dro_beta"] = 0.1
        section = AlgorithmSection.model_validate({"loss": loss, "options": options} | MODES.get(name, {}))
        found = list(algorithm_problems(section))
        assert bool(found) == (name not in accepted(loss)), (name, found)
        assert all(name in problem.text for problem in found), found


def test_every_accepted_option_changes_the_loss(one):
    effects = one["effects"][0]
    for loss in USABLE_LOSSES:
        measured = accepted(loss) - {"calculate_entropy"}
        assert {name for its, name in effects if its == loss} == measured
        # A release that has no other aggregation for a loss refuses the one that reads the factor.
        for name in measured - ({"loss_scale_factor"} if loss in LACKS.fixed else set()):
            usual, other = effects[loss, name]
            assert usual != other, (loss, name)


def test_each_loss_reads_the_options_that_its_table_lists(one):
    clips = {"clip_ratio", "clip_ratio_low", "clip_ratio_high"}
    beside = {"global_batch_info", "policy_loss", *clips}
    for loss, found in one["reads"][0].items():
        assert found - beside == LOSSES[loss].reads, loss
        assert bool(found & clips) == bool(LOSSES[loss].clip), loss


def test_keys_that_an_algorithm_refuses_do_not_change_its_result(one):
    found = one["keys_matter"][0]
    assert found["norm_advantage"] == NORMALISED
    chosen = {name for name in USABLE_LOSSES if LOSSES[name].has_modes and name not in LACKS.fixed}
    assert found["loss_agg_mode"] == chosen


def test_entropy_and_correction_options_change_the_metrics_of_a_step(one):
    found = one["through_the_engine"][0]["metrics"]
    assert "actor/entropy" not in found["rollout"]
    assert found["rollout with entropy"]["actor/entropy"] > 0
    assert found["corrected"]["actor/grad_norm"] != pytest.approx(found["plain"]["actor/grad_norm"], rel=1e-3)
    assert 0 < found["corrected"]["rollout_corr/rollout_is_mean"] <= 2


def test_every_engine_field_is_read_or_refused(one):
    names, read = one["fields"][0]["engine"], one["through_the_engine"][0]["engine"]
    usable = {*OF_ENGINE, *OF_FSDP1} - LACKS.options
    assert usable <= names
    for name in names:
        options = {name: VALUES.get(name, True)}
        if name.endswith("max_token_len_per_gpu"):
            options |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": 9}
        if name == "use_dynamic_bsz":
            options["max_token_len_per_gpu"] = 9
        for strategy in ("fsdp2", "fsdp"):
            found = list(engine_problems(EngineSection(strategy=strategy, options=options)))
            known = OF_ENGINE if strategy == "fsdp2" else usable
            assert bool(found) == (name not in known), (strategy, name, found)
    assert set(OF_ENGINE) - LACKS.options <= read, "a step with fsdp2 reads them all"


def test_both_tables_of_losses_list_the_same_options():
    assert set(OF_LOSSES) == {name for loss in LOSSES.values() for name in loss.reads}
