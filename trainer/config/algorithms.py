"""The algorithms by name, and the estimators and losses of verl that experiences suffice for. No torch here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from syncd.jobfile.loader import merged
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.plugins import POLICY_LOSSES

VERL = "verl"  # the engine that these tables are about
SFT = "sft"  # the one algorithm without experiences: the response tokens of examples are learnt


class Algorithm(NamedTuple):
    about: str  # one line for people: what it is, and where it is not what its publication says
    advantage: str = "grpo"  # verl's advantage estimator, empty for sft
    loss: str = "vanilla"  # verl's policy loss, empty for sft


ALGORITHMS: Mapping[str, Algorithm] = {
    SFT: Algorithm("likelihood of the responses of data.sft_path", "", ""),
    "grpo": Algorithm(
        "rewards against the mean of their group, clipped; token-mean and no KL loss, unlike DeepSeekMath"
    ),
    "ppo": Algorithm(
        "PPO's clipped loss; with a critic its advantage is gae, without one the whitened return",
        "reinforce_plus_plus",
    ),
    "gspo": Algorithm("grpo with one ratio for a whole response", loss="gspo"),
    "cispo": Algorithm("grpo with clipped weights that carry no gradient", loss="cispo"),
    "sapo": Algorithm("grpo with a soft gate instead of the clip", loss="sapo"),
    "dppo_tv": Algorithm("grpo bounded by total variation", loss="dppo_tv"),
    "dppo_kl": Algorithm("grpo bounded by KL divergence", loss="dppo_kl"),
    "clip_cov": Algorithm("grpo that leaves out tokens of high covariance", loss="clip_cov"),
    "kl_cov": Algorithm("grpo with a KL penalty on tokens of high covariance", loss="kl_cov"),
    "rloo": Algorithm(
        "rewards against the mean of the others of their group; PPO's loss, unlike the paper's REINFORCE",
        "rloo",
    ),
    "reinforce_plus_plus": Algorithm(
        "returns, whitened over the batch; no KL in rewards, unlike the paper", "reinforce_plus_plus"
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "the same, against the mean of the group", "reinforce_plus_plus_baseline"
    ),
    "opo": Algorithm("rewards against a baseline that weighs by length; exact with one update a step", "opo"),
    "gpg": Algorithm(
        "plain policy gradient; scaled by rows / rewards that are not 0, as verl has it", "gpg", "gpg"
    ),
    "grpo_passk": Algorithm("only the best of a group, against the second best", "grpo_passk"),
}
"""Each name with its pair. Dr. GRPO is a setting of grpo, not a name: see docs/algorithms.md."""


class Loss(NamedTuple):
    """What one of verl's policy losses reads, and what its publication sets."""

    clip: Mapping[str, float]  # the bounds of the publication, by their keys; empty for a loss that has none
    reads: frozenset[str] = frozenset()  # the names in algorithm.options that this loss reads
    mode: str = "token-mean"  # loss_agg_mode of the publication
    has_modes: bool = True  # whether another loss_agg_mode is possible
    options: Mapping[str, Any] = {}  # of `reads`, what the publication sets otherwise than verl does


LOSSES: Mapping[str, Loss] = {
    # Schulman et al., "Proximal Policy Optimization Algorithms", 2017: 0.2. verl adds a dual clip (Ye et al., 2020).
    "vanilla": Loss({"clip_ratio": 0.2}, frozenset({"clip_ratio_c"})),
    # Zheng et al., "Group Sequence Policy Optimization", 2025: 3e-4 and 4e-4, the mean over sequences.
    "gspo": Loss({"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, mode="seq-mean-token-mean"),
    # MiniMax, "MiniMax-M1", 2025: no bound below (1 - 10 < 0), the mean over tokens. It does not say its upper bound;
    # 0.2 is that of verl's example.
    "cispo": Loss({"clip_ratio_low": 10.0, "clip_ratio_high": 0.2}),
    # Gao et al., "Soft Adaptive Policy Optimization", 2025: temperatures 1 and 1.05 (verl's own), the mean over
    # sequences.
    "sapo": Loss({}, frozenset({"tau_pos", "tau_neg"}), mode="seq-mean-token-mean", has_modes=False),
    # Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026: thresholds of the divergence, and
    # weights that are truncated at 20.
    "dppo_tv": Loss({"clip_ratio": 0.15}, frozenset({"clip_ratio_c"}), options={"clip_ratio_c": 20.0}),
    "dppo_kl": Loss({"clip_ratio": 0.05}, frozenset({"clip_ratio_c"}), options={"clip_ratio_c": 20.0}),
    # Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", 2025: no ratio.
    "gpg": Loss({}),
    # Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025: 2e-4 of the
    # tokens with a covariance of 1 to 5 (verl's own), no other clip below 0 or above 2; KL: 2e-4, coefficient 1.
    "clip_cov": Loss(
        {"clip_ratio": 1.0},
        frozenset({"policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"}),
    ),
    "kl_cov": Loss(
        {},
        frozenset({"policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"}),
        options={"policy_loss": {"ppo_kl_coef": 1.0}},
    ),
    # Richemond et al., "Offline Regularised Reinforcement Learning for Large Language Models Alignment", 2024: the
    # penalty has no default.
    "dro": Loss({}, frozenset({"policy_loss.dro_beta"})),
}
"""verl's policy losses that need no more than log-probs and advantages, with the values of their publications."""

OWN_LOSS = Loss({"clip_ratio": 0.2}, frozenset[str]().union(*(loss.reads for loss in LOSSES.values())))
"""What a loss of another package may read, with verl's default clip."""

NORMALISED = frozenset({"grpo", "grpo_vectorized", "grpo_passk"})  # the estimators that read norm_advantage
OF_SEQUENCES = frozenset({"gspo"})  # the losses whose ratio is that of a whole rollout

_CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

OF_GAE = ("gamma", "lam")  # the keys that only gae reads

ADVANTAGES = frozenset(
    {algorithm.advantage for algorithm in ALGORITHMS.values()} - {""} | {"grpo_vectorized", "rloo_vectorized"}
)
"""verl's estimators that need no more than tokens, rewards and groups."""

GAE = "gae"  # the estimator that needs a critic

OF_TURNS = frozenset({GAE, "reinforce_plus_plus"})
"""The estimators that take rewards of tokens, and so of turns; the others add up a rollout's."""

OF_GROUPS = ADVANTAGES - {"reinforce_plus_plus"}  # the estimators that compare the rollouts of a group

_PAIRS = "verl 0.9 has no loss over pairs of responses"
_SCORED = "verl 0.9 has no loss over single responses that are called good or bad"
_REWARDS = "verl 0.9 has no training of reward models"

LACKING_ALGORITHMS: Mapping[str, str] = {
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo", "cpo"), _PAIRS),
    "kto": _SCORED,
    **dict.fromkeys(("rm", "reward_model", "reward_modeling"), _REWARDS),
}
"""Algorithms that others train with, and why they are not supported."""

LACKING: Mapping[str, str] = {
    "remax": "it needs the reward of a greedy rollout beside each sampled one",
    "gdpo": "it needs several rewards of each rollout",
    "optimal_token_baseline": "it needs sums over the whole vocabulary",
    "tir_optimal_token_baseline": "it needs sums over the whole vocabulary",
}
"""verl's other estimators besides gae, and why they are not supported."""

LACKING_LOSSES: Mapping[str, str] = {
    "geo_mean": "it would depend on how rows are split over ranks",
    "bypass_mode": 'it is algorithm.old_logprobs = "rollout" with another loss',
}
"""verl's other policy losses, and why they are not supported."""

AGGREGATIONS = frozenset(
    {
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    }
)
"""What verl's `loss_agg_mode` may be."""

KL_TYPES = frozenset(
    base + plus for base in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")
)
"""What verl's `kl_loss_type` may be; with `+` the gradient is that of k2."""

REWARD_KL_TYPES = frozenset(kind for kind in KL_TYPES if not kind.endswith("+"))
"""What verl's `kl_penalty` may be: rewards have no gradient, so `+` would change nothing."""


def needs_start_model(section: AlgorithmSection) -> bool:
    return section.name != SFT and (section.kl_coef > 0 or section.reward_kl_coef > 0)


def estimator_and_loss(section: AlgorithmSection) -> tuple[str, str]:
    """Return verl's advantage estimator and policy loss, empty where there is none (sft) or the name is unknown."""
    algorithm = ALGORITHMS.get(section.name, Algorithm("", "", ""))
    return section.advantage or algorithm.advantage, section.loss or algorithm.loss


def find_loss(name: str) -> Loss | None:
    """Return what a policy loss of verl or of another package reads, None if there is none of this name."""
    return LOSSES.get(name) or (OWN_LOSS if name and name in POLICY_LOSSES.installed else None)


def loss_names() -> frozenset[str]:
    return frozenset(LOSSES) | frozenset(POLICY_LOSSES.installed)


def unread(section: AlgorithmSection) -> tuple[str, ...]:
    """Return the keys of [algorithm] that the loss and the estimator do not read; none for sft, which has neither."""
    estimator, policy = estimator_and_loss(section)
    policy_loss = find_loss(policy)
    if estimator not in ADVANTAGES | {GAE} or policy_loss is None:
        return ()
    return (
        *(() if policy_loss.clip else _CLIPS),
        *(() if policy_loss.has_modes else ("loss_agg_mode",)),
        *(() if estimator in NORMALISED else ("norm_advantage",)),
        *(() if estimator == GAE else OF_GAE),
        *(() if estimator in OF_TURNS else ("turn_rewards",)),
    )


def with_published(section: AlgorithmSection) -> AlgorithmSection:
    """Return the table with the values of the publication wherever it says nothing; a second call changes nothing."""
    advantage, loss = estimator_and_loss(section)
    policy_loss, updates = find_loss(loss), dict[str, Any]()
    if policy_loss is None:
        return section
    if section.clip_ratio is None:
        updates |= {key: value for key, value in policy_loss.clip.items() if getattr(section, key) is None}
    if policy_loss.has_modes and not section.loss_agg_mode:
        updates["loss_agg_mode"] = policy_loss.mode
    if advantage in NORMALISED and section.norm_advantage is None:
        updates["norm_advantage"] = True
    updates["options"] = merged(policy_loss.options, section.options)
    return section.model_copy(update=updates)


def published(loss: str) -> tuple[str, str]:
    """Return the clip and the aggregation of a loss's publication, for people; `-` where there is none."""
    policy_loss = find_loss(loss)
    if policy_loss is None:
        return "-", "-"
    bounds = sorted(policy_loss.clip.items(), reverse=True)  # low, high
    return "/".join(f"{value:g}" for _, value in bounds) or "-", policy_loss.mode


def clip_bounds(section: AlgorithmSection) -> tuple[float, float] | None:
    """Return how far below and above 1 a ratio may be, None for a loss that has no such bounds."""
    below = section.clip_ratio if section.clip_ratio_low is None else section.clip_ratio_low
    above = section.clip_ratio if section.clip_ratio_high is None else section.clip_ratio_high
    return None if below is None or above is None else (below, above)
