"""Every listed algorithm against its advantages, loss and gradient computed here from the formulas, in plain Python.

Nothing of verl or torch is called for what is expected. The rows differ in length, mask and weight; they are taken in
one piece, in micro-batches, and dealt to two ranks.
"""

import math
from statistics import fmean, stdev

import pytest
from support import samples
from support.verl_release import USABLE_LOSSES

from trainer.config.algorithms import ALGORITHMS, SFT

pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [pytest.mark.group("engines"), pytest.mark.slow]

BATCH = samples.batch_of(5, weight=0.5)
MASKS = [list(map(float, row.action_mask)) for row in BATCH.experiences]
REWARDS = [row.reward for row in BATCH.experiences]
GROUPS = [[i for i, its in enumerate(BATCH.groups) if its == group] for group in sorted(set(BATCH.groups))]
TOKENS = sum(map(sum, MASKS))
ALL = [*(name for name in ALGORITHMS if name != SFT), *({"dro"} & set(USABLE_LOSSES))]


@pytest.fixture(scope="module")
def computed(one_rank):
    return one_rank("verl")["by_hand"][0]


# Advantages: one number a row, or one a token where the batch is whitened.


def of_groups(rule):
    found = [0.0] * len(REWARDS)
    for members in GROUPS:
        for place, value in zip(members, rule([REWARDS[i] for i in members], members), strict=True):
            found[place] = value
    return [[value * chosen for chosen in mask] for value, mask in zip(found, MASKS, strict=True)]


def grpo(rewards, _):
    return [(reward - fmean(rewards)) / (stdev(rewards) + 1e-6) for reward in rewards]


def rloo(rewards, _):
    others = len(rewards) - 1
    return [reward - (sum(rewards) - reward) / others for reward in rewards]


def opo(rewards, members):
    lengths = [sum(MASKS[i]) for i in members]
    baseline = sum(a * b for a, b in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [reward - baseline for reward in rewards]


def gpg(rewards, _):
    scale = len(REWARDS) / sum(reward != 0 for reward in REWARDS)
    return [scale * (reward - fmean(rewards)) for reward in rewards]


def passk(rewards, _):
    second, best = sorted(rewards)[-2:]
    place = rewards.index(best)
    return [(best - second) / (stdev(rewards) + 1e-6) if i == place else 0.0 for i in range(len(rewards))]


def centred(rewards, _):
    return [reward - fmean(rewards) for reward in rewards]


def whitened(values):
    """Return values of tokens with mean 0 and variance 1 over all tokens of the batch that the model chose."""
    chosen = [v for row, mask in zip(values, MASKS, strict=True) for v, m in zip(row, mask, strict=True) if m]
    mean, variance = fmean(chosen), stdev(chosen) ** 2
    return [
        [(v - mean) / math.sqrt(variance + 1e-8) * m for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(values, MASKS, strict=True)
    ]


def returns():
    return [[reward * chosen for chosen in mask] for reward, mask in zip(REWARDS, MASKS, strict=True)]


ADVANTAGES = {
    "ppo": lambda: whitened(returns()),
    "reinforce_plus_plus": lambda: whitened(returns()),
    "reinforce_plus_plus_baseline": lambda: whitened(of_groups(centred)),
    "rloo": lambda: of_groups(rloo),
    "opo": lambda: of_groups(opo),
    "gpg": lambda: of_groups(gpg),
    "grpo_passk": lambda: of_groups(passk),
}
"""Those of other algorithms are grpo's."""


def advantages(name):
    rows = ADVANTAGES.get(name, lambda: of_groups(grpo))()
    return [[value * weight for value in row] for row, weight in zip(rows, BATCH.weights, strict=True)]


# Losses: of each token the loss and its derivative by the log-prob.


def clipped(value, low, high):
    return min(max(value, low), high)


def ppo(a, now, old):
    """Clip at 0.2, and the dual clip at 3 where the advantage is negative."""
    ratio = math.exp(now - old)
    free, bound = -a * ratio, -a * clipped(ratio, 0.8, 1.2)
    loss, slope = (free, free) if free >= bound else (bound, 0.0)
    if a < 0 and loss > -3 * a:
        return -3 * a, 0.0
    return loss, slope


def cispo(a, now, old):
    """Weights of at most 1.2, with no bound below, through which no gradient goes."""
    weight = min(math.exp(now - old), 1.2)
    return -a * weight * now, -a * weight


def sapo(a, now, old):
    """A gate around the ratio 1, steeper for negative advantages."""
    tau, ratio = 1.0 if a > 0 else 1.05, math.exp(now - old)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * ratio


def dppo(within):
    def loss(a, now, old):
        if not within(a, math.exp(now), math.exp(old)):
            return 0.0, 0.0
        weight = min(math.exp(now - old), 20.0)
        return -a * weight * now, -a * weight

    return loss


def variation(a, p, q):
    return p - q <= 0.15 if a > 0 else p - q >= -0.15


def divergence(a, p, q):
    apart = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return apart <= 0.05 or (p <= q if a > 0 else p >= q)


def plain(a, now, _):
    return -a * now, -a


def dro(a, now, old):
    """The penalty is 0.3."""
    apart = now - old
    return -(now * a - 0.5 * 0.3 * apart**2), -(a - 0.3 * apart)


TOKENWISE = {
    "cispo": cispo, "sapo": sapo, "dppo_tv": dppo(variation), "dppo_kl": dppo(divergence), "gpg": plain, "dro": dro,
}  # fmt: skip
"""Losses of tokens by themselves; those of other algorithms are PPO's."""


def each(rule, given, values):
    """Return a rule of tokens for all tokens."""
    return [
        [rule(*token) for token in zip(*rows, strict=True)]
        for rows in zip(values, given["now"], given["old"], strict=True)
    ]


def gspo(given, values, _):
    """One ratio for a sequence, of the mean of its tokens' log-ratios; bounds 3e-4 and 4e-4."""
    found = []
    for row, mask, now, old in zip(values, MASKS, given["now"], given["old"], strict=True):
        ratio = math.exp(sum((n - o) * m for n, o, m in zip(now, old, mask, strict=True)) / sum(mask))
        tokens = []
        for a in row:
            free, bound = -a * ratio, -a * clipped(ratio, 1 - 3e-4, 1 + 4e-4)
            tokens.append((free, free) if free >= bound else (bound, 0.0))
        found.append(tokens)
    return found


def covariances(given, values, part):
    """Return the covariance of advantage and log-prob of each chosen token of a micro-batch."""
    places = [(i, t) for i in part for t, chosen in enumerate(MASKS[i]) if chosen]
    a = fmean(values[i][t] for i, t in places)
    now = fmean(given["now"][i][t] for i, t in places)
    return {(i, t): (values[i][t] - a) * (given["now"][i][t] - now) for i, t in places}


def clip_cov(given, values, parts):
    """All tokens with a covariance between 0.1 and 5 are left out (0.1 and the share are given)."""
    found = each(unclipped_above_2, given, values)
    for part in parts:
        for (i, t), value in covariances(given, values, part).items():
            a, ratio = values[i][t], math.exp(given["now"][i][t] - given["old"][i][t])
            if 0.1 < value < 5 and not -a * clipped(ratio, 0, 2) > -a * ratio:
                found[i][t] = 0.0, 0.0
    return found


def unclipped_above_2(a, now, old):
    ratio = math.exp(now - old)
    free, bound = -a * ratio, -a * clipped(ratio, 0, 2)
    return (free, free) if free >= bound else (bound, 0.0)


def kl_cov(given, values, parts):
    """The fifth of the tokens with the highest covariance gets a penalty of 1 x the absolute log-ratio."""
    found = each(lambda a, now, old: (-a * math.exp(now - old),) * 2, given, values)
    for part in parts:
        ranked = sorted(covariances(given, values, part).items(), key=lambda one: -one[1])
        for (i, t), _ in ranked[: max(1, int(len(ranked) * 0.2))]:
            loss, slope = found[i][t]
            apart = given["now"][i][t] - given["old"][i][t]
            found[i][t] = loss + abs(apart), slope + math.copysign(1.0, apart)
    return found


WHOLE = {"gspo": gspo, "clip_cov": clip_cov, "kl_cov": kl_cov}
MEAN_OF_SEQUENCES = {"gspo", "sapo"}


def expected(name, given, parts):
    """Return loss and gradients of an algorithm."""
    values = advantages(name)
    tokens = (
        WHOLE[name](given, values, parts) if name in WHOLE else each(TOKENWISE.get(name, ppo), given, values)
    )
    shares = [1 / sum(mask) / len(MASKS) if name in MEAN_OF_SEQUENCES else 1 / TOKENS for mask in MASKS]
    scaled = [
        [(loss * m * share, slope * m * share) for (loss, slope), m in zip(row, mask, strict=True)]
        for row, mask, share in zip(tokens, MASKS, shares, strict=True)
    ]
    return sum(loss for row in scaled for loss, _ in row), [[slope for _, slope in row] for row in scaled]


def flat(rows):
    return [value for row in rows for value in row]


def agrees(found, loss, gradients):
    assert found["loss"] == pytest.approx(loss, rel=2e-4, abs=1e-6)
    assert flat(found["gradients"]) == pytest.approx(flat(gradients), rel=1e-3, abs=1e-6)


def test_the_sample_batch_has_varied_lengths_masked_tokens_and_two_weights():
    assert len({len(mask) for mask in MASKS}) > 3
    assert any(0 in mask for mask in MASKS)
    assert len(set(BATCH.weights)) == 2


def test_results_exist_for_every_listed_algorithm(computed):
    assert set(computed["found"]) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_advantages_match_the_formula(computed, name):
    found = computed["found"][name]["advantages"]
    assert flat(found) == pytest.approx(flat(advantages(name)), rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("split", ["whole", "micro-batches", "two ranks"])
def test_loss_and_gradient_match_the_formula(computed, name, split):
    found = computed["found"][name][split]
    assert sorted(flat(found["parts"])) == list(range(len(MASKS)))
    assert len(found["parts"]) == {"whole": 1, "micro-batches": 4, "two ranks": 4}[split]
    agrees(found, *expected(name, computed["given"], found["parts"]))


@pytest.mark.parametrize("split", ["whole", "micro-batches", "two ranks"])
def test_sft_loss_is_the_mean_negative_log_likelihood(computed, split):
    now, found = computed["sft"]["now"], computed["sft"]["splits"][split]
    count = len(flat(now))
    agrees(found, -sum(flat(now)) / count, [[-1 / count] * len(row) for row in now])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
def test_rollout_correction_weights_match_the_formula(computed, level, threshold):
    given, found = computed["given"], computed["corrected"][level, threshold]
    rows = []
    for old, recorded, mask in zip(given["old"], given["recorded"], MASKS, strict=True):
        apart = [(o - r) * m for o, r, m in zip(old, recorded, mask, strict=True)]
        ratios = [math.exp(value if level == "token" else sum(apart)) for value in apart]
        if threshold == 2.0:
            bounded = [min(ratio, 2.0) for ratio in ratios]
        else:
            bounded = [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
        rows.append([weight * m for weight, m in zip(bounded, mask, strict=True)])
    assert 2.0 in flat(rows) or 0.0 in flat(rows), "the bounds are met"
    assert flat(found["weights"]) == pytest.approx(flat(rows), rel=1e-4, abs=1e-6)
    tokens = each(ppo, given, advantages("grpo"))
    scaled = [
        [(loss * w / TOKENS, slope * w / TOKENS) for (loss, slope), w in zip(row, weights, strict=True)]
        for row, weights in zip(tokens, rows, strict=True)
    ]
    for split in ("whole", "micro-batches", "two ranks"):
        agrees(found[split], sum(loss for loss, _ in flat(scaled)), [[s for _, s in row] for row in scaled])
