"""Agents, verl and the daemon as processes: segments, rewards of turns, a correction and the best step in one job.

What the trainer says of a step is compared with plain torch: the rows of its batch, the weights before it, formulas.
"""

import json

import pytest
from support.needed import need

torch = pytest.importorskip("torch", reason="the trainer needs torch")
need("verl", "the trainer needs verl")

from support import whole_jobs  # noqa: E402
from support.chat_model import write_chat_model  # noqa: E402
from support.job_file import job_of, write_job  # noqa: E402

from syncd.experience.table import decode_batch  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402
from syncd.protocol.request import read_pins  # noqa: E402

pytestmark = [pytest.mark.group("engines"), pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, GROUPS, SIZE, BOUND = 3, 2, 3, 1.05
AGENT = '''
import openai

def run(base_url, api_key, task):
    """Three turns, the last one after the history was given up; each has a reward of its own."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=10)

    def ask(history):
        return client.chat.completions.create(model="policy", messages=history).choices[0].message.content

    history = [{"role": "user", "content": task["prompt"]}]
    first = ask(history)
    second = ask([*history, {"role": "assistant", "content": first}, {"role": "user", "content": "again"}])
    third = ask([{"role": "user", "content": "anew " + task["prompt"]}])
    turns = [sum(letter in "aeiou" for letter in text) / 4 for text in (first, second, third)]
    return {"reward": sum(turns), "turn_rewards": turns}
'''
CORRECTION = {"rollout_is": "token", "rollout_is_threshold": BOUND}
JOB = job_of(
    job={"seed": 3},
    engine={"device": "cpu", "compute_dtype": "float32", "micro_batch_size": 4},
    algorithm={
        "name": "reinforce_plus_plus",
        "turn_rewards": True,
        "old_logprobs": "recompute",
        "optimizer": {"lr": 0.005},
        "options": {"policy_loss": {"rollout_correction": CORRECTION}},
    },
    data={"groups": GROUPS, "group_size": SIZE, "consumed": "archive"},
    sync={"dtype": "float32", "style": "fully_async"},
    trainer={"nproc": 1, "total_steps": STEPS},
    selection={"metric": "critic/score/mean", "keep_best": 1},
    daemon={"prune": False},
    explorer={
        "name": "e0",
        "tasks": "tasks.jsonl",
        "ahead": 1,
        "engine": {"dtype": "float32"},
        "sampling": {"max_tokens": 10},
        "agent": {"function": "agent:run", "concurrency": 3},
        "gateway": {"directory": "state"},
    },
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the directory of a job that has ended."""
    root = tmp_path_factory.mktemp("agents")
    torch.set_num_threads(1)
    write_chat_model(root / "model")
    (root / "agent.py").write_text(AGENT)
    write_job(root / "job.toml", JOB)
    (root / "tasks.jsonl").write_text("".join(f'{{"prompt": "task {at}"}}\n' for at in range(16)))
    whole_jobs.run_together(root, whole_jobs.TRAIN_AND_EXPLORE, 800, "verl")
    return root


def rows_of(root, step):
    """Return the rows that a step has learnt: that of its number among the batches of the one explorer."""
    (path,) = (root / "job" / "experiences").glob(f"**/{step}.parquet")
    return decode_batch(path.read_bytes(), str(path))


def metrics_of(root):
    lines = (root / "job" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["metrics"] for line in map(json.loads, lines)}


def model_before(root, step):
    """Return the model with the weights before a step."""
    from transformers import AutoModelForCausalLM

    path = root / "model" if step == 1 else root / "job" / f"global_step_{step - 1}" / "actor"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logprobs(model, row):
    """Return the log-probs of a row's response."""
    tokens = torch.tensor([list(row.tokens)])
    with torch.no_grad():
        found = model(tokens).logits[0, :-1].log_softmax(-1)
    chosen = found.gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[row.prompt_length - 1 :]


def expected(root, step):
    """Return by hand the figures of a step, whose one update is made by the weights before it."""
    ratios, returns = [], []
    rows, model = rows_of(root, step), model_before(root, step)
    for at, row in enumerate(rows):
        own = logprobs(model, row)
        later = sum(
            turn.reward
            for other in rows[at + 1 : at + row.segments - row.segment]
            for turn in other.turn_rewards
        )
        for place, learnt in enumerate(row.action_mask):
            if learnt:
                ratios.append(float(own[place]) - row.logprobs[place])
                returns.append(later + sum(turn.reward for turn in row.turn_rewards if turn.end > place))
    apart, returns = torch.tensor(ratios).double(), torch.tensor(returns).double()
    ratio, advantages = apart.exp(), (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    weights = ratio.clamp(max=BOUND)
    return {
        "rollout_corr/kl": float(-apart.mean()),
        "rollout_corr/k3_kl": float((ratio - 1 - apart).mean()),
        "rollout_corr/logprob_diff_mean": float(apart.abs().mean()),
        "rollout_corr/ratio_mean": float(ratio.mean()),
        "rollout_corr/chi2_token": float((ratio**2).mean() - 1),
        "rollout_corr/ess_token": float(ratio.mean() ** 2 / (ratio**2).mean()),
        "rollout_corr/rollout_is_mean": float(weights.mean()),
        "rollout_corr/rollout_is_oob_ratio": float((ratio > BOUND).double().mean()),
        "actor/pg_loss": float(-(advantages * weights).mean()),
        "critic/score/mean": sum(row.reward for row in rows if row.segment == 0) / (GROUPS * SIZE),
    }


def test_figures_of_each_step_are_those_of_the_formulas(ended, record_line):
    """The first step is on-policy but for kernels; a later one learns rollouts of an older version."""
    found = metrics_of(ended)
    assert list(found) == list(range(1, STEPS + 1))
    worst = 0.0
    for step, figures in found.items():
        by_hand = expected(ended, step)
        assert {name: figures[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-3, abs=2e-5), step
        worst = max(worst, *(abs(figures[name] - value) for name, value in by_hand.items()))
    assert found[1]["rollout_corr/k3_kl"] < 1e-6
    assert max(figures["rollout_corr/k3_kl"] for figures in found.values()) > 1e-3, (
        "no rollout was off-policy"
    )
    assert max(figures["rollout_corr/rollout_is_oob_ratio"] for figures in found.values()) > 0
    record_line(
        f"agents, segments, turn rewards and a correction with verl: within {worst:.1e} of plain torch"
    )


def test_rollouts_have_segments_and_rewards_of_turns_and_each_is_in_one_batch(ended):
    places = []
    for step in range(1, STEPS + 1):
        for row in rows_of(ended, step):
            assert (row.segments, row.info["turns"]) == (2, 2 - row.segment)
            assert len(row.turn_rewards) == row.info["turns"]
            places += [(row.group, row.rollout)] * (row.segment == 0)
    assert len(set(places)) == len(places) == STEPS * GROUPS * SIZE


def test_the_step_of_the_best_reward_is_kept(ended):
    rewards = {step: figures["critic/score/mean"] for step, figures in metrics_of(ended).items()}
    assert list(read_pins(Job.at(ended / "job"))) == [max(rewards, key=rewards.get)]
