"""A rollout is learnt the same into however many segments it is cut; turns, and corrections of whole rollouts.

What is expected of losses is what verl computes of rows that are not cut, which test_verl_algorithms.py compares with
the formulas. Numbers are given: no model is needed.
"""

import math
import random
from types import SimpleNamespace

import pytest
from support.needed import need

torch = pytest.importorskip("torch", reason="the trainer needs torch")
need("verl", "losses are verl's")

from support import samples  # noqa: E402
from support.experiences import fifo, write  # noqa: E402
from support.jobs import ManualClock  # noqa: E402

from syncd.errors import ConfigError  # noqa: E402
from syncd.experience.model import TurnReward  # noqa: E402
from syncd.jobfile.trainer_sections import AlgorithmSection  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.transports.ranks import Ranks  # noqa: E402
from trainer.config.algorithms import ALGORITHMS, SFT  # noqa: E402
from trainer.engines.verl import segments  # noqa: E402
from trainer.engines.verl.checks import resolve  # noqa: E402
from trainer.engines.verl.figures import StepMetrics, measure_rollouts  # noqa: E402
from trainer.engines.verl.release import release_problems  # noqa: E402
from trainer.engines.verl.rows import fill, prepare_step, rollout_rows  # noqa: E402

pytestmark = [pytest.mark.group("engines"), pytest.mark.slow]

WHOLE = samples.batch_of(5, weight=0.5)
CUT = samples.cut(WHOLE, 3)
GIVEN = {
    "clip_cov": {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1}},
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2}},
    "dro": {"policy_loss": {"dro_beta": 0.3}},
}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
NAMES = [*(name for name in ALGORITHMS if name != SFT), "dro"]


@pytest.fixture(scope="module")
def verl():
    """Return verl's losses and ours; its import warns of engines that are not used."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trainer.engines.verl import platform

        platform.install()
        from verl.utils import tensordict_utils

        from trainer.engines.verl import advantages, batches, correction, losses, settings
    return SimpleNamespace(
        advantages=advantages, batches=batches, correction=correction, losses=losses, settings=settings,
        tensordict=tensordict_utils,
    )  # fmt: skip


def values_of(batch, seed, spread):
    """Return a number for each response token, the same for a batch and for what it is cut into."""
    draw = random.Random(seed)
    found = [-3 + draw.uniform(-spread, spread) for row in batch.experiences for _ in row.logprobs]
    sizes = [len(row.logprobs) for row in batch.experiences]
    return [list(part) for part in torch.tensor(found).split(sizes)]


def learn(verl, section, batch, most=16):
    """Return loss, and gradients by the log-probs and entropies of all response tokens one after the other."""
    rows, ranks = rollout_rows(batch), Ranks()
    step = prepare_step(section, batch, mixed=False)
    leaves = [[torch.stack(row).requires_grad_() for row in values_of(batch, seed, 0.4)] for seed in (1, 2)]
    old, ref, recorded = (
        dict(enumerate(map(torch.stack, values_of(batch, seed, 0.3)))) for seed in (3, 4, 5)
    )
    own = verl.advantages.advantages(section, batch)
    columns = {"advantages": dict(enumerate(own)), "old_log_probs": old, "ref_log_prob": ref}
    if section.options.get("policy_loss", {}).get("rollout_correction"):
        whole = segments.measure_mismatch(ranks, step, old, recorded)
        table = section.options["policy_loss"]["rollout_correction"]
        columns["rollout_is_weights"] = verl.correction.correction_weights(
            table, rows, old, recorded, whole, step.figures
        )
    if segments.are_cut(rows) and segments.is_mean_of_rollouts(section):
        columns |= segments.with_shares(rows, columns)
    if section.loss == "gspo":
        now = {number: leaf.detach() for number, leaf in enumerate(leaves[0])}
        columns["old_log_probs"] = segments.with_ratio_of_rollouts(ranks, rows, old, now)
    actor = verl.settings.actor_config(samples.configured("m", algorithm={}), section, step.horizon)
    policy, total = verl.losses.PolicyLoss(actor, step.figures, 1.0), 0.0
    slots, size = fill(list(range(len(rows))), most)
    for start in range(0, len(slots), size):
        part = slots[start : start + size]
        budget = verl.batches.MicroBatch(size, None)
        data = verl.batches.tensors(rows, part, columns, budget, temperature=1.0, calculate_entropy=True)
        tokens = sum(int(row.mask.sum()) for row in rows)
        verl.tensordict.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(batch.firsts)
        )
        output = {
            name: placed(rows, part, leaf)
            for name, leaf in zip(("log_probs", "entropy"), leaves, strict=True)
        }
        loss, _ = policy(output, data)
        loss.backward()
        total += float(loss.detach())
    return total, *(torch.cat([leaf.grad for leaf in kind]) for kind in leaves), step.figures.over(ranks)


def placed(rows, slots, leaves):
    found = []
    for slot in slots:
        before = torch.zeros(0 if slot is None else rows[slot].prompt - 1)
        found.append(torch.cat([before, torch.zeros(1) if slot is None else leaves[slot], torch.zeros(1)]))
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def section_of(name, mode, **more):
    chosen = {"name": name} if name in ALGORITHMS else {"loss": name}
    options = GIVEN.get(name, {}) | more.pop("options", {})
    aggregation = {} if name == "sapo" else {"loss_agg_mode": mode}
    terms = {"kl_coef": 0.1, "kl_type": "low_var_kl", "entropy_coeff": 0.05}
    return resolve(
        AlgorithmSection.model_validate({**chosen, **aggregation, **terms, **more, "options": options})
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_do_not_depend_on_how_rollouts_are_cut(verl, name, mode):
    section = section_of(name, mode)
    if any(release_problems(samples.configured("m").model_copy(update={"algorithm": section}))):
        pytest.skip("this release of verl is refused with it")
    loss, by_log_prob, by_entropy, figures = learn(verl, section, WHOLE)
    assert by_entropy.abs().sum() > 0
    # Which tokens clip_cov and kl_cov choose depends on the micro-batch, so they get all rows in one.
    for most in (64,) if name in ("clip_cov", "kl_cov") else (64, 4):
        again, log_prob, entropy, measured = learn(verl, section, CUT, most)
        assert again == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert torch.allclose(log_prob, by_log_prob, rtol=1e-4, atol=1e-7)
        assert torch.allclose(entropy, by_entropy, rtol=1e-4, atol=1e-7)
        assert {key: measured[key] for key in figures} == pytest.approx(figures, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.5, "0.7_1.5", "0_1.5"])
def test_corrected_losses_do_not_depend_on_it_either(verl, level, threshold):
    table = {"rollout_is": level, "rollout_is_threshold": threshold}
    for mode in ("token-mean", "seq-mean-token-mean"):
        section = section_of("grpo", mode, options={"policy_loss": {"rollout_correction": table}})
        loss, by_log_prob, _, figures = learn(verl, section, WHOLE)
        again, log_prob, _, measured = learn(verl, section, CUT, 4)
        assert again == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(log_prob, by_log_prob, rtol=1e-4, atol=1e-7)
        assert measured == pytest.approx(figures, rel=1e-5, abs=1e-6)
        assert 0 < figures["rollout_corr/rollout_is_oob_ratio"] < 1, "the bounds are met"


HALF, FIFTH = math.log(0.5), math.log(0.2)
APART = ([math.log(2.0), HALF, 0.0], [math.log(4.0), 7.0], [FIFTH])
"""log p(model) - log p(explorer): of a rollout of two rows, whose last token is a tool's, and of another."""

MASKS = ([1, 1, 1], [1, 0], [1])


def hand_rows():
    return [
        SimpleNamespace(mask=torch.tensor(mask), rollout=number)
        for mask, number in zip(MASKS, (0, 0, 1), strict=True)
    ]


@pytest.mark.parametrize(
    ("level", "threshold", "expected", "out"),
    [
        ("token", 2.0, ([2, 0.5, 1], [2, 0], [0.2]), 1 / 5),
        ("token", "0.4_2", ([2, 0.5, 1], [0, 0], [0]), 2 / 5),
        ("token", "0_2", ([2, 0.5, 1], [0, 0], [0.2]), 1 / 5),
        ("sequence", 3.0, ([3, 3, 3], [3, 0], [0.2]), 4 / 5),
        ("sequence", "0.25_3", ([0, 0, 0], [0, 0], [0]), 5 / 5),
        ("sequence", "0.25_4", ([4, 4, 4], [4, 0], [0]), 1 / 5),
    ],
)
def test_weights_by_hand(verl, level, threshold, expected, out):
    rows, figures = hand_rows(), StepMetrics()
    own = {number: torch.tensor(row, dtype=torch.float64) for number, row in enumerate(APART)}
    none = {number: torch.zeros(len(row), dtype=torch.float64) for number, row in enumerate(APART)}
    whole = segments.sums_of_rollouts(Ranks(), rows, segments.log_ratio_sums(rows, own, none))
    assert whole == pytest.approx({0: math.log(4), 1: math.log(4), 2: FIFTH}), "2 x 1/2 x 1 x 4, and 1/5"
    table = {"rollout_is": level, "rollout_is_threshold": threshold}
    found = verl.correction.correction_weights(table, rows, own, none, whole, figures)
    for number, weights in enumerate(expected):
        assert found[number].tolist() == pytest.approx(weights, rel=1e-6)
    metrics = figures.over(Ranks())
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(map(sum, expected)) / 5)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(out)


def test_mismatch_by_hand():
    rows, figures = hand_rows(), StepMetrics()
    own = {number: torch.tensor(row, dtype=torch.float64) for number, row in enumerate(APART)}
    none = {number: torch.zeros(len(row), dtype=torch.float64) for number, row in enumerate(APART)}
    segments.measure_mismatch(Ranks(), SimpleNamespace(rollouts=rows, figures=figures), own, none)
    ratios, rollouts = [2, 0.5, 1, 4, 0.2], [4, 0.2]
    mean = sum(ratios) / 5
    logs = [math.log(ratio) for ratio in ratios]
    assert figures.over(Ranks()) == pytest.approx(
        {
            "rollout_corr/logprob_diff_mean": sum(map(abs, logs)) / 5,
            "rollout_corr/logprob_diff_max": math.log(5),
            "rollout_corr/ratio_mean": mean,
            "rollout_corr/kl": -sum(logs) / 5,
            "rollout_corr/k3_kl": mean - 1 - sum(logs) / 5,
            "rollout_corr/chi2_token": sum(ratio**2 for ratio in ratios) / 5 - 1,
            "rollout_corr/ess_token": sum(ratios) ** 2 / (5 * sum(ratio**2 for ratio in ratios)),
            "rollout_corr/ratio_seq_mean": 2.1,
            "rollout_corr/chi2_seq": (16 + 0.04) / 2 - 1,
            "rollout_corr/ess_seq": sum(rollouts) ** 2 / (2 * 16.04),
        }
    )


def test_policies_that_are_far_apart_have_a_sample_size():
    """Squares of ratios of 1e-9 and less are nothing beside 1; log-ratios are cut at 20."""
    figures = StepMetrics()
    measure_rollouts(figures, [-30.0, -19.0])
    ones, squares = (math.exp(-20 * power) + math.exp(-19 * power) for power in (1, 2))
    found = figures.over(Ranks())
    assert found["rollout_corr/ess_seq"] == pytest.approx(ones**2 / (2 * squares))
    assert found["rollout_corr/chi2_seq"] == -1.0


def turns(*rewards):
    return [TurnReward(end, reward) for end, reward in rewards]


def agent(rows, rollout, *, reward):
    """Return a rollout of segments: masks with the rewards of the turns that end in each."""
    return [
        samples.row_of(
            mask, reward=reward, group="g", rollout=rollout, segment=at, segments=len(rows), turns=its
        )
        for at, (mask, its) in enumerate(rows)
    ]


def test_a_token_gets_the_rewards_from_its_own_turn_on(verl):
    """Two segments: a turn that ends with a tool's token, an empty one before any choice, and two of the second."""
    first = agent(
        [([0, 1, 1, 0, 1], turns((1, 0.5), (4, 1.0), (5, -2.0))), ([1, 0, 1], turns((2, 3.0), (3, 0.25)))],
        0,
        reward=2.75,
    )
    second = agent([([1, 1], None)], 1, reward=4.0)
    batch = samples.batch_of_rows([*first, *second])
    expected = [[0, 2.25, 2.25, 0, 1.25], [3.25, 0, 0.25], [4, 4]]
    learnt = torch.tensor([2.25, 2.25, 1.25, 3.25, 0.25, 4, 4], dtype=torch.float64)
    whitened = (learnt - learnt.mean()) / (learnt.var() + 1e-8).sqrt()
    section = resolve(AlgorithmSection(advantage="reinforce_plus_plus", turn_rewards=True))
    found = verl.advantages.advantages(section, batch)
    masks = [torch.tensor(list(row.learnt)).bool() for row in batch.experiences]
    chosen = torch.cat([row[mask] for row, mask in zip(found, masks, strict=True)])
    assert chosen.tolist() == pytest.approx(whitened.tolist(), rel=1e-5)
    gae = AlgorithmSection(name="ppo", advantage="gae", turn_rewards=True, lam=1.0)
    zeros = [torch.zeros(len(row)) for row in masks]
    advantages, returns = verl.advantages.gae(gae, batch, zeros)
    for row, its in zip(returns, expected, strict=True):
        assert row.tolist() == pytest.approx(its, abs=1e-6)
    assert torch.cat(
        [row[mask] for row, mask in zip(advantages, masks, strict=True)]
    ).tolist() == pytest.approx(whitened.tolist(), rel=1e-5)


def test_rewards_that_an_agent_gives_its_turns_reach_its_tokens(verl, tmp_path):
    """Two rollouts through gateway, batch and sampler; without values, lambda 1 leaves the rewards still to come."""
    rows = pytest.importorskip("explorer_hooks.parts.agents.rows")
    from support.gateway_bed import GatewayBed, ScriptedEngine

    bed = GatewayBed(tmp_path / "state", ScriptedEngine(lambda prompt: [10, 11, 0]))
    (tmp_path / "job").mkdir()
    job = Job.at(tmp_path / "job")

    async def main(bed):
        for rollout, its in enumerate(([0.25, 2.0], [-1.0, 0.5])):
            session = await bed.session("g", rollout)
            _, history = await bed.ask(session, [{"role": "user", "content": "hello"}])
            await bed.ask(session, [*history, {"role": "user", "content": "go on"}])
            await bed.gateway.reward(session, {"reward": sum(its), "turn_rewards": its})
        return rows.experiences_of(bed.sessions.groups["g"], "g", 1.0)

    write(job, "e0", bed.run(main))
    batch = fifo(job, ManualClock(), groups=1).sample(1, generation=1)
    gap = [0.0] * len(bed.ids("\n<|user|>go on<|end|>\n<|assistant|>"))
    gae = AlgorithmSection(name="ppo", advantage="gae", turn_rewards=True, lam=1.0)
    zeros = [torch.zeros(len(row.action_mask)) for row in batch.experiences]
    _, returns = verl.advantages.gae(gae, batch, zeros)
    expected = [[2.25] * 3 + gap + [2.0] * 3, [-0.5] * 3 + gap + [0.5] * 3]
    assert [row.tolist() for row in returns] == [pytest.approx(its) for its in expected]


def by_tokens(seed):
    """Return a log-prob for each response token of the batch."""
    draw = random.Random(seed)
    return [torch.tensor([draw.uniform(-3, 0) for _ in row.logprobs]) for row in WHOLE.experiences]


@pytest.mark.parametrize("kind", ["kl", "k2", "k3", "abs"])
def test_kl_in_the_reward_is_what_a_computation_by_hand_says(verl, kind):
    """rloo: each rollout's reward less its summed penalty, against the mean of the others of its group."""
    formula = {
        "kl": lambda d: d, "k2": lambda d: d * d / 2, "abs": abs, "k3": lambda d: math.exp(-d) + d - 1
    }[kind]  # fmt: skip
    section = resolve(AlgorithmSection(name="rloo", reward_kl_coef=0.3, reward_kl_type=kind))
    policy, start = by_tokens(1), by_tokens(2)
    penalties, kl = verl.advantages.reward_penalties(section, WHOLE, policy, start)
    found = verl.advantages.advantages(section, WHOLE, penalties)
    sums, means = [], []
    for row, now, first in zip(WHOLE.experiences, policy, start, strict=True):
        kls = [formula(float(now[at] - first[at])) for at, learnt in enumerate(row.learnt) if learnt]
        sums.append(row.reward - 0.3 * sum(kls))
        means.append(sum(kls) / max(len(kls), 1))
    assert kl == pytest.approx(sum(means) / len(means), rel=1e-5)
    for at, (row, group) in enumerate(zip(WHOLE.experiences, WHOLE.groups, strict=True)):
        others = [sums[it] for it, its in enumerate(WHOLE.groups) if its == group and it != at]
        expected = (sums[at] - sum(others) / len(others)) * WHOLE.weights[at] if others else None
        for value, learnt in zip(found[at].tolist(), row.learnt, strict=True):
            if expected is not None:
                assert value == pytest.approx(expected if learnt else 0.0, rel=1e-4, abs=1e-5)


def test_kl_in_the_reward_lowers_the_returns_of_a_critic_from_its_token_on(verl):
    section = AlgorithmSection(name="ppo", advantage="gae", lam=1.0, gamma=0.5, reward_kl_coef=0.3)
    policy, start = by_tokens(1), by_tokens(2)
    penalties, _ = verl.advantages.reward_penalties(section, WHOLE, policy, start)
    zeros = [torch.zeros(len(row.logprobs)) for row in WHOLE.experiences]
    _, returns = verl.advantages.gae(section, WHOLE, zeros, penalties)
    for row, its, now, first in zip(WHOLE.experiences, returns, policy, start, strict=True):
        learnt = [at for at, is_learnt in enumerate(row.learnt) if is_learnt]
        following = 0.0
        for at in reversed(learnt):
            reward = row.reward if at == learnt[-1] else 0.0
            following = reward - 0.3 * float(now[at] - first[at]) + 0.5 * following
            assert float(its[at]) == pytest.approx(following, rel=1e-4, abs=1e-5)


def test_rewards_of_turns_are_refused_where_no_rollout_has_any(verl):
    section = resolve(AlgorithmSection(advantage="reinforce_plus_plus", turn_rewards=True))
    with pytest.raises(ConfigError, match="no rollout of the batch has any"):
        verl.advantages.advantages(section, WHOLE)


def test_the_cut_batch_learns_the_same_tokens_in_several_segments():
    assert len(CUT.experiences) > 1.5 * len(WHOLE.experiences)
    assert [row.reward for row in CUT.firsts] == [row.reward for row in WHOLE.firsts]
    for rollout, row in enumerate(WHOLE.experiences):
        parts = [one for one, its in zip(CUT.experiences, CUT.rollouts, strict=True) if its == rollout]
        assert list(parts[-1].tokens) == list(row.tokens)
        assert [one.prompt_length for one in parts[1:]] == [len(one.tokens) for one in parts[:-1]]
        assert [x for one in parts for x in one.action_mask] == list(row.action_mask)
