"""The figures that a run of verl's engines produces, by the keys that decide it: what `selection.metric` may name.

Other engines, losses and sample strategies have figures of their own, which nobody knows before the run.
"""

from collections.abc import Iterator

from syncd.figures import RENAMED
from syncd.jobfile.evaluation import PREFIX
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, nearest
from trainer.config.algorithms import LOSSES, SFT, VERL, estimator_and_loss, needs_start_model
from trainer.config.options import correction

_FAMILIES = (PREFIX, "reward/parts/", "tools/", "experience/")
"""How names begin of which not all are known before the run: of parts, tools, evaluations and reasons."""

_OF_ALL = """
actor/grad_norm actor/lr actor/updates_skipped train/tokens perf/tokens_per_second perf/train_tokens_per_second
perf/total_num_tokens perf/throughput perf/mfu/actor perf/cpu_memory_used_gb perf/max_memory_allocated_gb
perf/max_memory_reserved_gb timing_s/step timing_s/train_step timing_s/sample timing_s/sample_wait
timing_s/update_actor timing_s/forward timing_s/backward timing_s/optimizer
"""
_OF_ROLLOUTS = """
actor/pg_loss actor/ppo_kl actor/pg_clipfrac actor/pg_clipfrac_lower actor/entropy rollout_corr/logprob_diff_mean
rollout_corr/logprob_diff_max rollout_corr/ratio_mean rollout_corr/kl rollout_corr/k3_kl rollout_corr/chi2_token
rollout_corr/ess_token rollout_corr/ratio_seq_mean rollout_corr/chi2_seq rollout_corr/ess_seq
critic/score/mean critic/score/std critic/score/max critic/score/min
critic/advantages/mean critic/advantages/max critic/advantages/min
response_length/mean response_length/max response_length/min prompt_length/mean prompt_length/max prompt_length/min
reward/equal_groups reward/equal_groups_dropped response/tokens response/tool_tokens_mean response/truncated
teacher/reverse_kl teacher/logprob_diff_mean teacher/tokens timing_s/old_log_prob
"""
_OF_EXAMPLES = "sft/loss data/epoch"
_OF_VALIDATION = "validation/loss validation/tokens"
_OF_KL = "actor/kl_loss"
_OF_REWARD_KL = "actor/reward_kl_penalty"
_OF_START_MODEL = "timing_s/ref"
_OF_CORRECTION = "rollout_corr/rollout_is_mean rollout_corr/rollout_is_oob_ratio"
_OF_CRITIC = """
critic/vf_loss critic/vf_clipfrac critic/vf_explained_var critic/grad_norm critic/lr critic/updates_skipped
critic/values/mean critic/values/max critic/values/min critic/returns/mean critic/returns/max critic/returns/min
perf/mfu/critic timing_s/critic timing_s/values timing_s/update_critic timing_s/critic_forward
timing_s/critic_backward timing_s/critic_optimizer
"""

_TABLES = (
    _OF_ALL,
    _OF_ROLLOUTS,
    _OF_EXAMPLES,
    _OF_VALIDATION,
    _OF_KL,
    _OF_REWARD_KL,
    _OF_START_MODEL,
    _OF_CORRECTION,
    _OF_CRITIC,
)
KNOWN = frozenset(name for names in _TABLES for name in names.split())
"""Every figure that some run has, but those of families."""


def metric_problems(config: JobFile) -> Iterator[Problem]:
    metric, produced = config.selection.metric, _produced(config)
    if metric in RENAMED:
        text = f'selection.metric = "{metric}" is what it was called until 2026-11-24'
        yield Problem("selection.metric", text, f'metric = "{RENAMED[metric]}"')
        return
    if not metric or metric.startswith(_FAMILIES) or not _is_known_before(config) or metric in produced:
        return
    text = f'selection.metric = "{metric}": no step of this run has such a figure'
    yield Problem("selection.metric", text, nearest(metric, produced) or "eval/reward, or critic/score/mean")


def _is_known_before(config: JobFile) -> bool:
    loss = estimator_and_loss(config.algorithm)[1]
    return config.engine.name == VERL and not config.data.strategy and (not loss or loss in LOSSES)


def _produced(config: JobFile) -> frozenset[str]:
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
