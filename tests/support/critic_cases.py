"""Cases of the critic: a step of PPO against plain torch, resumes bit for bit, and what is refused."""

import itertools
import math
import os
import shutil

import torch
import transformers

from support import samples
from support.engine_cases import content_of, equal, refusal, weights_of, write_state
from support.verl_cases import _chosen, _distribution
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.engines.verl.rows import rollout_rows

PPO = {
    "algorithm": {"name": "ppo", "gamma": 0.9, "lam": 0.8},
    "critic": {
        "enabled": True, "clip_range": 0.2, "epochs": 2, "mini_batches": 2,
        "optimizer": {"lr": 3e-2, "clip_grad": 1e6},
    },
}  # fmt: skip
"""Values move further than the clip between the updates of a step."""


def critic_weights(engine):
    """Return the critic's whole weights by name, on all ranks."""
    state = engine._critic.model.module.state_dict()
    return {name: tensor.full_tensor().detach().clone() for name, tensor in state.items()}


BUDGETS = {
    "eight": {"micro_batch_size": 8},
    "three": {"micro_batch_size": 3, "infer_micro_batch_size": 4},
    "tokens": {"options": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}},
    "packed": {"packing": True, "options": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}},
}


def critic_moments(engine):
    """Return the whole state of the critic's AdamW, on all ranks."""
    state = engine._critic.model.optimizer.state_dict()["state"]
    return {
        (number, name): getattr(value, "full_tensor", value.clone)().detach().clone()
        for number, its in state.items()
        for name, value in its.items()
    }


def ppo_steps(bench):
    """Return what a step of PPO does for each way to divide the rows into micro-batches."""
    return {name: _ppo_step(bench, budget) for name, budget in BUDGETS.items()}


def _ppo_step(bench, budget):
    """Return the weights of both models before and after a step, values before it, and its metrics."""
    engine, batch = bench.engine_of(**PPO, engine=budget), samples.batch_of(5, weight=0.5)
    found = {"critic before": critic_weights(engine), "actor before": weights_of(engine)}
    found["values"] = engine._critic._values(rollout_rows(batch))
    found["metrics"] = engine.train_step(batch)
    return found | {"critic after": critic_weights(engine), "actor after": weights_of(engine)}


def ppo_by_hand(bench):
    """Return the same by transformers and torch alone, from the critic's first weights of `ppo_steps`."""
    start = torch.load(f"{bench.directory}/ppo_steps.0.pt", weights_only=False)["eight"]
    batch = samples.batch_of(5, weight=0.5)
    critic, actor = plain_critic(bench, start["critic before"]), _plain_actor(bench)
    with torch.no_grad():
        values = [_values(critic, row) for row in batch.experiences]
    advantages, returns = hand_gae(batch, values, 0.9, 0.8)
    losses, shares, norms = _learn_values(critic, batch, values, returns)
    actor_loss, actor_norm = _learn_policy(actor, batch, advantages)
    return {
        "values": values, "advantages": advantages, "returns": returns,
        "critic after": dict(critic.named_parameters()), "actor after": dict(actor.named_parameters()),
        "metrics": {
            "critic/vf_loss": sum(losses) / len(losses), "critic/vf_clipfrac": sum(shares) / len(shares),
            "critic/grad_norm": sum(norms) / len(norms), "critic/lr": 3e-2,
            "actor/pg_loss": actor_loss, "actor/grad_norm": actor_norm,
        },
    }  # fmt: skip


def plain_critic(bench, weights):
    config = transformers.AutoConfig.from_pretrained(f"{bench.models}/untied", num_labels=1)
    config.classifier_dropout = 0.0
    model = transformers.AutoModelForTokenClassification.from_config(config).float()
    model.load_state_dict(weights)
    return model


def _plain_actor(bench):
    return transformers.AutoModelForCausalLM.from_pretrained(f"{bench.models}/untied", dtype=torch.float32)


def _values(critic, row):
    found = critic(torch.tensor([list(row.tokens)])).logits[0, :, 0]
    return found[row.prompt_length - 1 : -1]


def hand_gae(batch, values, gamma, lam):
    """Return advantages (whitened, weighted) and returns of each token, by a loop over the tokens of each rollout."""
    advantages, returns = [[[0.0] * len(row) for row in values] for _ in range(2)]
    places = {}
    for number, (rollout, row) in enumerate(zip(batch.rollouts, batch.experiences, strict=True)):
        its = places.setdefault(rollout, [])
        its += [(number, at) for at, learnt in enumerate(row.learnt) if learnt]
    for rollout, tokens in places.items():
        following, advantage = 0.0, 0.0
        for place, (number, at) in reversed(list(enumerate(tokens))):
            value = float(values[number][at])
            reward = batch.firsts[rollout].reward if place == len(tokens) - 1 else 0.0
            advantage = reward + gamma * following - value + gamma * lam * advantage
            advantages[number][at], returns[number][at] = advantage, advantage + value
            following = value
    every = [advantages[number][at] for tokens in places.values() for number, at in tokens]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in every) / (len(every) - 1) + 1e-8)
    for tokens in places.values():
        for number, at in tokens:
            weight = batch.weights[number]
            advantages[number][at] = (advantages[number][at] - mean) / deviation * weight
    return advantages, returns


def _learn_values(critic, batch, values, returns):
    """Make four updates: two passes in two halves, each the mean over its tokens."""
    optimizer = torch.optim.AdamW(critic.parameters(), 3e-2, (0.9, 0.999), weight_decay=0.0)
    losses, shares, norms = [], [], []
    for half in (range(5), range(5, 10)) * 2:
        parts, clipped = [], []
        for number in half:
            row = batch.experiences[number]
            learnt = torch.tensor(list(map(bool, row.learnt)))
            now, old, goal = _values(critic, row), values[number], torch.tensor(returns[number])
            free, bound = (now - goal) ** 2, (now.clamp(old - 0.2, old + 0.2) - goal) ** 2
            parts.append((0.5 * torch.maximum(free, bound))[learnt])
            clipped.append((bound > free)[learnt].float())
        loss = torch.cat(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(critic.parameters(), 1e6)))
        optimizer.step()
        losses.append(float(loss.detach()))
        shares.append((float(torch.cat(clipped).sum()), len(torch.cat(clipped))))
    share = sum(count for count, _ in shares) / sum(tokens for _, tokens in shares)
    return losses, [share], norms


def _learn_policy(actor, batch, advantages):
    """Make one update, in which all ratios are 1."""
    optimizer = torch.optim.AdamW(actor.parameters(), 1e-2, (0.9, 0.999), weight_decay=0.0)
    total, tokens = 0, sum(sum(row.learnt) for row in batch.experiences)
    for row, its in zip(batch.experiences, advantages, strict=True):
        chosen = _chosen(_distribution(actor, row.tokens, row.prompt_length), row.tokens, row.prompt_length)
        total = total - (torch.tensor(its) * (chosen - chosen.detach()).exp()).sum() / tokens
    total.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(actor.parameters(), 1e6))
    optimizer.step()
    return float(total.detach()), norm


def gae_of_segments(bench):
    """Return advantages and returns of rollouts of several segments by verl and by hand, with given values."""
    from trainer.engines.verl.advantages import gae  # verl needs a platform first, which an engine installs
    from trainer.engines.verl.figures import value_metrics

    batch = samples.segmented_batch(7)
    torch.manual_seed(1)
    values = [torch.randn(len(row.logprobs)) for row in batch.experiences]
    found = gae(AlgorithmSection(name="ppo", advantage="gae", gamma=0.7, lam=0.6), batch, values)
    masks = [torch.tensor(list(row.learnt)) for row in batch.experiences]
    return {"found": found, "expected": hand_gae(batch, values, 0.7, 0.6)} | {
        "metrics": value_metrics(values, found[1], masks),
        "same": value_metrics(values, [torch.ones_like(row) for row in values], masks),
    }


def ppo_resumed(bench):
    """Train, save, train on; and once more from what was saved; then from a state without its critic."""
    tables = PPO | {"critic": PPO["critic"] | {"warmup_steps": 1}}
    engine = bench.engine_of(**tables)
    start = weights_of(engine)
    found = {"metrics": [engine.train_step(samples.batch_of(1))]}
    found["actor moved"] = [not equal(start, weights_of(engine))]
    write_state(engine, _place(bench, "state"))
    found["metrics"] += [engine.train_step(samples.batch_of(seed)) for seed in (2, 3)]
    found["actor moved"].append(not equal(start, weights_of(engine)))
    found |= {"critic end": critic_weights(engine), "moments": critic_moments(engine)}
    write_state(engine, _place(bench, "straight"))
    found["next"] = engine.train_step(samples.batch_of(4))
    again = bench.engine_of(**tables)
    again.load_training_state(_place(bench, "state"))
    again.train_step_num = 1
    found["again"] = [again.train_step(samples.batch_of(seed)) for seed in (2, 3)]
    write_state(again, _place(bench, "resumed"))
    bench.ranks.gather(None)
    found["files"] = _same_files(_place(bench, "straight"), _place(bench, "resumed"))
    if bench.ranks.rank == 0:
        shutil.rmtree(f"{_place(bench, 'state')}/critic")
    bench.ranks.gather(None)
    found["without"] = refusal(lambda: again.load_training_state(_place(bench, "state")))
    return found


def ppo_of_two_ranks(bench):
    """Return both models as one rank resumes them from a state of two, and its next step."""
    engine = bench.engine_of(**PPO)
    engine.load_training_state(bench.place("ppo-straight-2"))
    found = {"critic end": critic_weights(engine), "moments": critic_moments(engine)}
    return found | {"next": engine.train_step(samples.batch_of(4))}


def _place(bench, name):
    """Return a directory of this number of ranks: one rank works where two have."""
    return bench.place(f"ppo-{name}-{bench.ranks.world_size}")


def _same_files(one, other):
    names = [os.path.relpath(f"{place}/{name}", one) for place, _, files in os.walk(one) for name in files]
    return {name: equal(content_of(f"{one}/{name}"), content_of(f"{other}/{name}")) for name in names}


def ppo_learns(bench):
    """Return metrics of steps on one batch."""
    tables = PPO | {"critic": PPO["critic"] | {"clip_range": 10.0, "optimizer": {"lr": 1e-2}}}
    engine = bench.engine_of("tied", **tables | {"algorithm": {"name": "ppo", "lam": 1.0}})
    return [engine.train_step(samples.batch_of(3)) for _ in range(12)]


def ppo_on_gpus(bench):
    """Return metrics of steps on one batch by each strategy, in bfloat16, with all that is kept elsewhere."""
    tables = PPO | {"critic": PPO["critic"] | {"clip_range": 10.0, "optimizer": {"lr": 1e-2}}}
    found = {}
    for strategy, offload in itertools.product(("fsdp2", "fsdp"), (False, True)):
        kept = {"offload_params": offload, "offload_optimizer": offload}
        engine = bench.engine_of(**tables, engine={"strategy": strategy, "compute_dtype": "bfloat16", **kept})
        found[strategy, offload] = [engine.train_step(samples.batch_of(3)) for _ in range(12)]
    return found


def small_critic(bench):
    """Return what a critic with a smaller vocabulary, of a class without a head, without a tensor is refused with."""
    lacking = PPO | {"critic": {"enabled": True, "path": f"{bench.models}/lacking"}}
    found = {"lacking": refusal(lambda: bench.engine_of(**lacking))}
    for kind, vocabulary in (("Llama", 40), ("GPT2", 61)):
        path = f"{bench.place('critics')}/{kind}-{bench.ranks.rank}"
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tables = PPO | {"critic": {"enabled": True, "path": path}}
        found[kind] = refusal(lambda tables=tables: bench.engine_of(**tables))
    return found
