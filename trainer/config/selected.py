"""The figures that a run of verl's engines produces, by the keys that decide it: what `selection.metric` may name.

Other engines, losses and sample strategies have figures of their own, which nobody knows before the run.
"""

from collections.abc import Iterator

from syncd.jobfile.evaluation import PREFIX
from syncd.jobfile.problems import Problem, nearest
from trainer.config.algorithms import LOSSES, SFT, VERL, estimator_and_loss, needs_start_model
from trainer.config.model import JobConfig
from trainer.config.options import correction

_FAMILIES = (PREFIX, "reward/parts/", "tools/", "experience/")
"""How names begin of which not all are known before the run: of parts, tools, evaluations and reasons."""

_OF_ALL = """
actor/grad_norm actor/lr actor/updates_skipped train/tokens perf/tokens_per_second perf/train_tokens_per_second
time/step time/train_step time/sample time/sample_wait time/forward time/backward time/optimizer
"""
_OF_ROLLOUTS = """
actor/pg_loss actor/ppo_kl actor/pg_clipfrac actor/entropy rollout/logprob_diff_mean rollout/logprob_diff_max
rollout/ratio_mean rollout/kl rollout/k3_kl rollout/chi2_token rollout/ess_token rollout/ratio_seq_mean
rollout/chi2_seq rollout/ess_seq reward/mean reward/std reward/max reward/min reward/equal_groups
reward/equal_groups_dropped response/length_mean response/tokens response/tool_tokens_mean response/truncated
teacher/reverse_kl teacher/logprob_diff_mean teacher/tokens time/old_logprobs
"""
_OF_EXAMPLES = "sft/loss data/epoch"
_OF_VALIDATION = "validation/loss validation/tokens"
_OF_KL = "actor/kl_loss"
_OF_REWARD_KL = "actor/reward_kl_penalty"
_OF_START_MODEL = "time/reference"
_OF_CORRECTION = "rollout/is_weight_mean rollout/is_out_of_bounds"
_OF_CRITIC = """
critic/vf_loss critic/vf_clipfrac critic/value_mean critic/return_mean critic/explained_variance critic/grad_norm
critic/lr critic/updates_skipped time/critic time/critic_forward time/critic_backward time/critic_optimizer
"""


def metric_problems(config: JobConfig) -> Iterator[Problem]:
    """Yield why no step of the run could have the figure that `selection.metric` names."""
    metric, produced = config.selection.metric, _produced(config)
    if not metric or metric.startswith(_FAMILIES) or not _is_known_before(config) or metric in produced:
        return
    text = f'selection.metric = "{metric}": no step of this run has such a figure'
    yield Problem("selection.metric", text, nearest(metric, produced) or "eval/reward, or reward/mean")


def _is_known_before(config: JobConfig) -> bool:
    loss = estimator_and_loss(config.algorithm)[1]
    return config.engine.name == VERL and not config.data.strategy and (not loss or loss in LOSSES)


def _produced(config: JobConfig) -> frozenset[str]:
    algorithm, is_sft = config.algorithm, config.algorithm.name == SFT
    tables = {
        _OF_ALL: True,
        _OF_ROLLOUTS: not is_sft,
        _OF_EXAMPLES: is_sft or config.data.sft_ratio > 0,
        _OF_VALIDATION: bool(config.data.validation_path),
        _OF_KL: not is_sft and algorithm.kl_coef > 0,
        _OF_REWARD_KL: not is_sft and algorithm.reward_kl_coef > 0,
        _OF_START_MODEL: needs_start_model(algorithm),
        _OF_CORRECTION: not is_sft and correction(algorithm.options) is not None,
        _OF_CRITIC: config.critic.enabled,
    }
    return frozenset(name for names, is_there in tables.items() if is_there for name in names.split())
