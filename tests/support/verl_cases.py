"""Cases of verl's engine: gradients however rows are dealt, and what it refuses."""

import contextlib
import glob
import json
import os
import tempfile
from dataclasses import replace
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

from support import samples
from support.engine_cases import content_of, equal, gradients, log_probs, refusal, weights_of, write_state
from support.verl_release import USABLE_LOSSES
from syncd.jobfile.trainer_sections import AlgorithmSection
from trainer.config.algorithms import ALGORITHMS
from trainer.engines.verl.checks import resolve

STILL = {"optimizer": {"lr": 1e-30}}
"""Updates that change no weight, so that one engine shows many of them."""

GRADIENTS = {
    "token-mean": {},
    "sequences": {"loss_agg_mode": "seq-mean-token-mean"},
    "normed": {"loss_agg_mode": "seq-mean-token-sum-norm", "norm_advantage": False},
    "entropy": {"entropy_coeff": 0.1, "temperature": 0.7},
    "gspo": {"name": "gspo"},
    "sft": {"name": "sft"},
    "mixed": {},
}
BUDGETS = {
    "eight": (8, None, False), "three": (3, None, False), "tokens": (8, 24, False),
    "packed": (8, None, True), "packed tokens": (8, 24, True),
}  # fmt: skip


def same_gradients(bench):
    """Return gradients and figures of one step for each way to divide the rows."""
    engine, found = bench.engine_of(algorithm=STILL), {}
    for name, algorithm in GRADIENTS.items():
        learn(engine, algorithm)
        for budget, (rows, tokens, packing) in BUDGETS.items():
            settings = engine.model.engine_config
            settings.use_remove_padding = packing
            settings.micro_batch_size_per_gpu, settings.infer_micro_batch_size_per_gpu = rows, rows - 1
            settings.use_dynamic_bsz, settings.max_token_len_per_gpu = tokens is not None, tokens
            batch = samples.batch_of(5, weight=0.5, examples=5 if name in ("sft", "mixed") else 0)
            with gradients(engine) as kept:
                metrics = engine.train_step(batch)
            found[name, budget] = kept, metrics
    return found


def learn(engine, algorithm):
    """Make a built engine learn something else; nothing of its model depends on it."""
    section = AlgorithmSection.model_validate(algorithm | STILL)
    engine._algorithm = engine._updates._algorithm = resolve(section)


def expected_gradients(bench):
    """Return the same by transformers alone, with the formulas written out."""
    plain, mixed = samples.batch_of(5, weight=0.5), samples.batch_of(5, weight=0.5, examples=5)
    return {
        "token-mean": _expected(bench, lambda model: _grpo(model, plain)),
        "entropy": _expected(bench, lambda model: _grpo(model, plain, 0.7, 0.1)),
        "sft": _expected(bench, lambda model: _sft(model, mixed.examples)),
        "mixed": _expected(bench, lambda model: _grpo(model, mixed) + _sft(model, mixed.examples)),
    }


def _expected(bench, loss):
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{bench.models}/untied", dtype=torch.float32)
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _distribution(model, tokens, prompt, temperature=1.0):
    logits = model(torch.tensor([list(tokens)])).logits[0, prompt - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)


def _chosen(distribution, tokens, prompt):
    return distribution.gather(1, torch.tensor(list(tokens[prompt:]))[:, None])[:, 0]


def _grpo(model, batch, temperature=1.0, entropy=0.0):
    total, tokens = 0, sum(sum(row.action_mask) for row in batch.experiences)
    for row, group, weight in zip(batch.experiences, batch.groups, batch.weights, strict=True):
        rewards = torch.tensor(
            [one.reward for one, its in zip(batch.experiences, batch.groups, strict=True) if its == group]
        )
        advantage = weight * (row.reward - rewards.mean()) / (rewards.std() + 1e-6)
        distribution = _distribution(model, row.tokens, row.prompt_length, temperature)
        chosen = _chosen(distribution, row.tokens, row.prompt_length)
        ratio = (chosen - chosen.detach()).exp()
        disorder = -(distribution.exp() * distribution).sum(-1)
        mask = torch.tensor(list(row.action_mask))
        total = total - ((advantage * ratio + entropy * disorder) * mask).sum() / tokens
    return total


def _sft(model, examples):
    parts = [
        _chosen(_distribution(model, one.tokens, one.prompt_length), one.tokens, one.prompt_length)
        for one in examples
    ]
    return -torch.cat(parts).mean()


SEGMENTS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def segments(bench):
    """Return gradients of a batch of rollouts of several segments, for each way to add up losses, and figures."""
    engine, found = bench.engine_of(algorithm=STILL), {}
    for mode in SEGMENTS:
        learn(engine, {"loss_agg_mode": mode})
        engine.model.engine_config.micro_batch_size_per_gpu = 4
        with gradients(engine) as kept:
            metrics = engine.train_step(samples.segmented_batch(7))
        found[mode] = kept, metrics
    return found


PIECES = {
    "grpo": {"loss_agg_mode": "seq-mean-token-mean", "kl_coef": 0.3, "kl_type": "k1", "entropy_coeff": 0.1},
    "gspo": {"name": "gspo", "old_logprobs": "rollout", "clip_ratio_low": 0.9, "clip_ratio_high": 9.0},
    "corrected": {"options": {"policy_loss": {"rollout_correction": {"rollout_is_threshold": 1e9}}}},
}
"""Algorithms that take a whole rollout for one thing: a mean with what is added to it, a ratio, a weight."""


def pieces(bench):
    """Return gradients and figures of rollouts as one row each, and cut into up to three, for each of them."""
    engine = bench.engine_of(algorithm=STILL | PIECES["grpo"])
    engine.model.engine_config.micro_batch_size_per_gpu = 3
    whole, found = samples.batch_of(5, weight=0.5), {}
    for name, algorithm in PIECES.items():
        learn(engine, algorithm | {"mini_batches": 2})
        for batch in (whole, samples.cut(whole, 3)):
            with gradients(engine) as kept:
                metrics = engine.train_step(batch)
            found.setdefault(name, []).append((kept, metrics))
    return found


def expected_segments(bench):
    """Return the same by transformers alone: a rollout's tokens are those of all its segments."""
    batch = samples.segmented_batch(7)
    return {
        mode: _expected(bench, lambda model, mode=mode: _rollouts(model, batch, mode)) for mode in SEGMENTS
    }


def _rollouts(model, batch, mode):
    losses, counts, lengths = {}, {}, {}
    for row, group, weight in zip(batch.experiences, batch.groups, batch.weights, strict=True):
        rewards = torch.tensor([
            one.reward for one, its in zip(batch.experiences, batch.groups, strict=True)
            if its == group and one.segment == 0
        ])  # fmt: skip
        advantage = weight * (row.reward - rewards.mean()) / (rewards.std() + 1e-6)
        chosen = _chosen(_distribution(model, row.tokens, row.prompt_length), row.tokens, row.prompt_length)
        doubted = row.unproven or [False] * len(row.logprobs)
        learnt = torch.tensor([bool(a) and not b for a, b in zip(row.action_mask, doubted, strict=True)])
        key = (group, row.rollout)
        losses[key] = losses.get(key, 0) - (advantage * (chosen - chosen.detach()).exp() * learnt).sum()
        counts[key] = counts.get(key, 0) + int(learnt.sum())
        lengths[key] = lengths.get(key, 0) + len(row.logprobs)
    total = sum(losses.values())
    return {
        "token-mean": total / sum(counts.values()),
        "seq-mean-token-sum": total / len(losses),
        "seq-mean-token-mean": sum(losses[key] / counts[key] for key in losses) / len(losses),
        "seq-mean-token-sum-norm": total / len(losses) / max(lengths.values()),
    }[mode]


def plain_log_probs(bench):
    """Return log-probs by transformers alone: before training, and of a step as explorers load it after it."""
    batch = samples.batch_of(9)
    found = {}
    for model in ("untied", "tied"):
        engine = bench.engine_of(model, sync={"dtype": "float32"})
        found[model, "fresh"] = _both(engine, f"{bench.models}/{model}", batch)
        engine.train_step(samples.batch_of(1))
        found[model, "trained"] = _both(engine, _written(bench, engine, model), batch)
        names = {name for name, _ in engine.export()}
        found[model, "names"] = (names, set(engine.model.module.state_dict()), sorted(engine.tied))
        found[model, "files"] = {name: bytes(content) for name, content in engine.companions().items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{bench.directory}/untied")
    return found | {"tokenizer": tokenizer("w3 w9")["input_ids"]}


def _both(engine, path, batch):
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        plain = [
            _chosen(_distribution(model, row.tokens, row.prompt_length), row.tokens, row.prompt_length)
            for row in batch.experiences
        ]
    return log_probs(engine, batch), plain, str(model.dtype)


def _written(bench, engine, name):
    path = bench.place(name)
    tensors = {key: value.contiguous() for key, value in weights_of(engine).items() if key not in engine.tied}
    save_file(tensors, f"{path}/model.safetensors", {"format": "pt"})
    for file_name, content in engine.companions().items():
        with open(f"{path}/{file_name}", "wb") as file:
            file.write(content)
    return path


PROBED = ((3, 1, 4, 1, 5, 9, 2, 6), (5, 3), (60, 0, 59), tuple(range(40)), (7, 7, 7, 7))


def probed(bench):
    """Return log-probs of tokens by the engine and by transformers alone: before training, and after it."""
    found = {}
    for model in ("untied", "tied"):
        engine = bench.engine_of(model, sync={"dtype": "float32"}, algorithm={"temperature": 0.7})
        found[model, "fresh"] = engine.token_logprobs(PROBED), _asked(f"{bench.models}/{model}")
        engine.train_step(samples.batch_of(1))
        exported = _written(bench, engine, f"{model}-of-{bench.ranks.rank}")
        found[model, "trained"] = engine.token_logprobs(PROBED), _asked(exported)
    return found


def _asked(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [_chosen(_distribution(model, row, 1), row, 1).tolist() for row in PROBED]


def undisturbed(bench):
    """Train with dropout, asked for log-probs and not; return metrics, whether anything differs, and draws after."""
    found = []
    for asked in (False, True):
        engine, metrics = bench.engine_of("dropout"), []
        for seed in (1, 2):
            if asked:
                engine.token_logprobs(PROBED)
            metrics.append(engine.train_step(samples.batch_of(seed)))
        weights = weights_of(engine)
        write_state(engine, bench.place(f"asked-{asked}"))
        found.append((metrics, weights, float(torch.rand(()))))
    bench.ranks.gather(None)
    same = {
        name: equal(*(content_of(f"{bench.place(f'asked-{asked}')}/{name}") for asked in (False, True)))
        for name in os.listdir(bench.place("asked-True"))
    }
    return {"found": found, "same": same}


def as_verl_saves(bench):
    """Return whether this rank's files hold what verl's own `save_checkpoint` writes, by name."""
    engine = bench.engine_of("tied")
    engine.train_step(samples.batch_of(1))
    engine.model.save_checkpoint(bench.place("by verl"))
    for lock in glob.glob(f"{tempfile.gettempdir()}/ckpt_*.lock"):  # verl leaves them; we must not
        with contextlib.suppress(FileNotFoundError):
            os.remove(lock)
    write_state(engine, bench.place("by us"))
    ending = f"rank_{bench.ranks.rank}.pt"
    names = [name for name in os.listdir(bench.place("by verl")) if name.endswith(ending)]
    return {
        name: equal(*(content_of(f"{bench.place(place)}/{name}") for place in ("by verl", "by us")))
        for name in names
    }


def many_updates(bench):
    """Return figures of steps of several updates each, with rollouts' log-probs, a KL loss and a schedule."""
    engine = bench.engine_of(
        algorithm={
            "old_logprobs": "rollout", "kl_coef": 0.1, "mini_batches": 3, "epochs": 2,
            "optimizer": {"schedule": "cosine", "warmup_steps": 2, "lr": 1e-3},
        },
        trainer={"total_steps": 4},
    )  # fmt: skip
    return [engine.train_step(samples.batch_of(seed)) for seed in (1, 2)]


def reward_kl(bench):
    """Return figures of three steps with KL in the reward at a falling rate, and log-probs: the start's, the last."""
    algorithm = {
        "name": "rloo", "reward_kl_coef": 0.2, "reward_kl_type": "k3",
        "optimizer": {"schedule": "linear", "warmup_steps": 1, "lr": 1e-2},
    }  # fmt: skip
    engine = bench.engine_of(algorithm=algorithm, trainer={"total_steps": 3})
    batches = [samples.batch_of(seed, weight=0.5) for seed in (1, 2, 3)]
    start = log_probs(engine, batches[-1])
    metrics = [engine.train_step(batch) for batch in batches[:-1]]
    before = log_probs(engine, batches[-1])
    with gradients(engine) as kept:
        metrics.append(engine.train_step(batches[-1]))
    return {"metrics": metrics, "start": start, "before": before, "gradients": kept}


def unlearnt_part(bench):
    """Return figures of two steps with KL in the reward; in one of two parts of the second nothing is learnt."""
    engine = bench.engine_of(algorithm={"name": "rloo", "reward_kl_coef": 0.2, "mini_batches": 2})
    batch = samples.batch_of(1, sizes=(4, 4))
    rows = (
        replace(row, unproven=[True] * len(row.logprobs)) if group else row
        for row, group in zip(batch.experiences, batch.groups, strict=True)
    )
    return [engine.train_step(batch), engine.train_step(replace(batch, experiences=tuple(rows)))]


def learns(bench):
    """Return the loss of examples over steps, and the figures of rollouts over steps on one batch."""
    sft = bench.engine_of(algorithm={"name": "sft", "optimizer": {"lr": 5e-2}})
    batch = samples.batch_of(3, sizes=(), examples=6)
    examples = [sft.train_step(batch)["sft/loss"] for _ in range(8)]
    policy = bench.engine_of("tied", algorithm={"optimizer": {"lr": 3e-3}})
    rollouts = samples.batch_of(4, sizes=(4, 2))
    before = log_probs(policy, rollouts)
    for _ in range(5):
        policy.train_step(rollouts)
    gained = [float((b - a).sum()) for a, b in zip(before, log_probs(policy, rollouts), strict=True)]
    return {"examples": examples, "gained": gained, "rewards": [row.reward for row in rollouts.experiences]}


def not_finite(bench):
    """Train on rewards that no difference can be taken of, until it is refused."""
    engine = bench.engine_of(algorithm={"optimizer": {"schedule": "cosine", "schedule_steps": 50}})
    before, huge = weights_of(engine), samples.batch_of(1, reward=3e38)
    metrics = engine.train_step(huge)
    same = all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    after = engine.train_step(samples.batch_of(1))
    refused = [refusal(lambda: engine.train_step(huge)) for _ in range(10)]
    return {"skipped": metrics, "same": same, "after": after, "refused": refused}


DRO = {"policy_loss": {"dro_beta": 0.1}}


def every_algorithm(bench):
    """Return the figures of one step of each algorithm, estimator and loss."""
    from trainer.config.algorithms import ADVANTAGES

    ways = [{"name": name} for name, pair in ALGORITHMS.items() if pair.loss]
    ways += [{"advantage": name} for name in sorted(ADVANTAGES)]
    ways += [{"loss": name, "options": DRO if name == "dro" else {}} for name in USABLE_LOSSES]
    engine, found = bench.engine_of(algorithm=STILL), []
    for way in ways:
        learn(engine, way)
        found.append((way, engine.train_step(samples.batch_of(2))))
    return found


def halves(bench):
    """Train in bfloat16."""
    engine = bench.engine_of(engine={"compute_dtype": "bfloat16"}, model={"gradient_checkpointing": True})
    return engine.train_step(samples.batch_of(1)), {str(tensor.dtype) for _, tensor in engine.export()}


REFUSED = {
    "fsdp on processors": {"engine": {"strategy": "fsdp"}},
    "flash attention on processors": {
        "model": {"attn_implementation": "flash_attention_2"},
        "engine": {"compute_dtype": "bfloat16"},
    },
    "strategy": {"engine": {"strategy": "fsdp3"}},
    "algorithm": {"algorithm": {"name": "grop"}},
    "no critic": {"algorithm": {"advantage": "gae"}},
    "critic of another estimator": {"critic": {"enabled": True}},
    "critic that does not exist": {
        "algorithm": {"name": "ppo"},
        "critic": {"enabled": True, "path": "/nowhere"},
    },
    "baseline": {"algorithm": {"advantage": "remax"}},
    "estimator": {"algorithm": {"advantage": "grpoo"}},
    "loss": {"algorithm": {"loss": "vanila"}},
    "mean of a micro-batch": {"algorithm": {"loss": "geo_mean"}},
    "another loss of bypassed updates": {"algorithm": {"loss": "bypass_mode"}},
    "dro": {"algorithm": {"loss": "dro"}},
    "aggregation": {"algorithm": {"loss_agg_mode": "mean"}},
    "kl": {"algorithm": {"kl_type": "k9"}},
    "engine option": {"engine": {"options": {"reshard_after_forwrad": True}}},
    "engine option elsewhere": {"engine": {"options": {"param_offload": True}}},
    "actor option": {"algorithm": {"options": {"clip_ratio_d": 3.0}}},
    "loss option": {"algorithm": {"options": {"policy_loss": {"dro": 3.0}}}},
    "cosine": {"algorithm": {"optimizer": {"schedule": "cosine"}}},
    "no directory": {"model": {"path": "/nowhere/model"}},
    "attention": {"model": {"attn_implementation": "none"}},
    "tokens": {"engine": {"options": {"use_dynamic_bsz": True}}},
}


def refused(bench):
    """Return what each configuration, and each batch, is refused with."""
    found = {
        name: refusal(lambda tables=tables: bench.engine_of(**tables)) for name, tables in REFUSED.items()
    }
    for which in ("lacking", "reshaped"):
        found[which] = refusal(lambda which=which: bench.engine_of(which))
    engine = bench.engine_of()
    rows = samples.batch_of(1)
    object.__setattr__(rows.experiences[0], "tokens", [samples.VOCAB] * len(rows.experiences[0].tokens))
    found["vocabulary"] = refusal(lambda: engine.train_step(rows))
    found["empty"] = refusal(lambda: engine.train_step(samples.batch_of(1, sizes=())))
    tight = bench.engine_of(engine={"options": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 5}})
    found["long row"] = refusal(lambda: tight.train_step(samples.batch_of(1)))
    alone = bench.engine_of(algorithm={"advantage": "grpo_passk"})
    found["alone"] = refusal(lambda: alone.train_step(samples.batch_of(1, sizes=(1, 1))))
    # An attention that takes packed rows for one.
    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
        found["packing"] = refusal(lambda: bench.engine_of(engine={"packing": True}))
    return found


def no_ray(bench):
    """Say whether Ray runs, and name all processes below this one."""
    import ray

    return ray.is_initialized(), _below(os.getpid())


def _below(pid):
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                name, rest = file.read().rsplit(")", 1)
        except OSError:
            continue
        if int(rest.split()[1]) == pid:
            found += [name.split("(", 1)[1], *_below(int(entry))]
    return found


def platform(bench):
    """Say what verl takes for its device."""
    from verl.utils.device import get_device_name, get_nccl_backend

    return json.dumps([get_device_name(), get_nccl_backend()])


def on_gpus(bench):
    """Return first and last figures of steps by each strategy, in bfloat16, with all that is kept elsewhere."""
    found = {}
    for strategy in ("fsdp2", "fsdp"):
        for offload in (False, True):
            engine = bench.engine_of(
                engine={
                    "strategy": strategy,
                    "compute_dtype": "bfloat16",
                    "offload_params": offload,
                    "offload_optimizer": offload,
                },
                algorithm={"kl_coef": 0.01},
            )
            metrics = [engine.train_step(samples.batch_of(3, examples=6)) for _ in range(8)]
            found[strategy, offload] = metrics[0], metrics[-1]
            assert len(weights_of(engine)) == 21
    return found


def split_on_gpus(bench):
    """Return what Megatron makes of a model that all ranks split: weights, steps of SFT, and steps of a resume."""
    tables = {
        "model": {"dtype": "bfloat16"},
        "engine": {
            "strategy": "megatron",
            "compute_dtype": "bfloat16",
            "options": {"tensor_model_parallel_size": bench.ranks.world_size},
        },
        "algorithm": {"name": "sft"},
    }
    engine, batch = bench.engine_of("even", **tables), samples.batch_of(3, examples=6)
    found = {"start": weights_of(engine), "metrics": [engine.train_step(batch) for _ in range(2)]}
    write_state(engine, bench.place("split"))
    found["metrics"] += [engine.train_step(batch) for _ in range(2)]
    bench.ranks.gather(None)
    again = bench.engine_of("even", **tables)
    again.load_training_state(bench.place("split"))
    return found | {"again": [again.train_step(batch) for _ in range(2)]}
