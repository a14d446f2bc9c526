"""The algorithms by name, and which of verl's estimators and losses an experience has enough for. No torch here."""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.config.model import AlgorithmSection

SFT = "sft"
"""The one algorithm without experiences: the response tokens of examples are learnt."""


class Algorithm(NamedTuple):
    """What a name stands for.

    Args:
        advantage: verl's advantage estimator, empty for sft.
        loss: verl's policy loss, empty for sft.
        about: One line for people.
    """

    advantage: str
    loss: str
    about: str


ALGORITHMS: Mapping[str, Algorithm] = {
    SFT: Algorithm("", "", "likelihood of the responses of data.sft_path"),
    "grpo": Algorithm("grpo", "vanilla", "rewards against the mean of their group, clipped"),
    "ppo": Algorithm(
        "reinforce_plus_plus", "vanilla", "PPO's clipped loss; without a critic its advantage is the return"
    ),
    "gspo": Algorithm("grpo", "gspo", "grpo with one ratio for a whole response"),
    "cispo": Algorithm("grpo", "cispo", "grpo with clipped weights that carry no gradient"),
    "sapo": Algorithm("grpo", "sapo", "grpo with a soft gate instead of the clip"),
    "dppo_tv": Algorithm("grpo", "dppo_tv", "grpo bounded by total variation"),
    "dppo_kl": Algorithm("grpo", "dppo_kl", "grpo bounded by KL divergence"),
    "clip_cov": Algorithm("grpo", "clip_cov", "grpo that leaves out tokens of high covariance"),
    "kl_cov": Algorithm("grpo", "kl_cov", "grpo with a KL penalty on tokens of high covariance"),
    "rloo": Algorithm("rloo", "vanilla", "rewards against the mean of the others of their group"),
    "reinforce_plus_plus": Algorithm("reinforce_plus_plus", "vanilla", "returns, whitened over the batch"),
    "reinforce_plus_plus_baseline": Algorithm(
        "reinforce_plus_plus_baseline", "vanilla", "the same, against the mean of the group"
    ),
    "opo": Algorithm("opo", "vanilla", "rewards against a baseline that weighs by length"),
    "gpg": Algorithm("gpg", "gpg", "plain policy gradient against the mean of the group"),
    "grpo_passk": Algorithm("grpo_passk", "vanilla", "only the best of a group, against the second best"),
}
"""Each name with its pair. Dr. GRPO is a setting of grpo, no name of its own: see docs/configuration.md."""

ADVANTAGES = frozenset(
    {algorithm.advantage for algorithm in ALGORITHMS.values()} - {""} | {"grpo_vectorized", "rloo_vectorized"}
)
"""verl's estimators that need no more than tokens, rewards and groups."""

LACKING: Mapping[str, str] = {
    "gae": "it needs a critic",
    "remax": "it needs the reward of a greedy rollout beside each sampled one",
    "gdpo": "it needs several rewards of each rollout",
    "optimal_token_baseline": "it needs sums over the whole vocabulary",
    "tir_optimal_token_baseline": "it needs sums over the whole vocabulary",
}
"""verl's other estimators, and why they cannot be had."""

LOSSES = frozenset({algorithm.loss for algorithm in ALGORITHMS.values()} - {""} | {"dro"})
"""verl's policy losses that need no more than log-probs and advantages."""

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


def estimator_and_loss(section: AlgorithmSection) -> tuple[str, str]:
    """Return verl's advantage estimator and policy loss, empty where there is none (sft) or the name is unknown."""
    known = ALGORITHMS.get(section.name, Algorithm("", "", ""))
    return section.advantage or known.advantage, section.loss or known.loss
