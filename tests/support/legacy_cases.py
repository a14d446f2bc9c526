"""Cases of the engine `verl_legacy`: gradients, log-probs, examples, and what it refuses."""

import json
import shutil

from support import samples, verl_cases
from support.engine_cases import gradients, log_probs, refusal, weights_of
from support.verl_cases import STILL
from trainer.config.algorithms import ALGORITHMS

WAYS = {
    "token-mean": {},
    "sequences": {"loss_agg_mode": "seq-mean-token-mean"},
    "normed": {"loss_agg_mode": "seq-mean-token-sum-norm", "norm_advantage": False},
    "gspo": {"name": "gspo"},
    "sft": {"name": "sft"},
    "rollout": {"old_logprobs": "rollout", "mini_batches": 3},
}
SIZES = (8, 3)


def batch_for(way):
    """Return rollouts of every kind, or examples alone."""
    return samples.batch_of(5, (), 7) if way == "sft" else samples.batch_of(5, weight=0.5)


def legacy_gradients(bench):
    """Return gradients and figures of one step for some algorithms and each size of a micro-batch."""
    return _steps(bench, WAYS)


def legacy_every_algorithm(bench):
    """Return the same for each algorithm by its name."""
    return _steps(bench, {name: {"name": name} for name, pair in ALGORITHMS.items() if pair.loss})


def _steps(bench, ways):
    found = {}
    for way, algorithm in ways.items():
        for size in SIZES:
            sizes = {"micro_batch_size": size, "infer_micro_batch_size": size - 1}
            engine = bench.engine_of(algorithm=algorithm | STILL, engine=sizes)
            with gradients(engine) as kept:
                metrics = engine.train_step(batch_for(way))
            found[way, size] = kept, metrics
    return found


def legacy_expected(bench):
    """Return the same by transformers alone, with the formulas written out."""
    rollouts, examples = batch_for("token-mean"), batch_for("sft").examples
    return {
        "token-mean": verl_cases._expected(bench, lambda model: verl_cases._grpo(model, rollouts)),
        "sequences": verl_cases._expected(
            bench, lambda model: verl_cases._rollouts(model, rollouts, "seq-mean-token-mean")
        ),
        "sft": verl_cases._expected(bench, lambda model: verl_cases._sft(model, examples)),
    }


def legacy_log_probs(bench):
    """Return log-probs by transformers alone: before training, and of a step as explorers load it after it."""
    batch, found = samples.batch_of(9), {}
    for name in ("untied", "tied"):
        place = f"{bench.place('legacy')}/{name}"
        samples.make_model(place, tied=name == "tied", tokenizer=True)
        engine = bench.engine_of(model={"path": place}, sync={"dtype": "float32"})
        found[name, "fresh"] = verl_cases._both(engine, place, batch)
        engine.train_step(samples.batch_of(1))
        found[name, "trained"] = verl_cases._both(engine, verl_cases._written(bench, engine, name), batch)
        exported = weights_of(engine)
        dtypes = {str(value.dtype) for value in exported.values()}
        found[name, "names"] = (
            set(exported),
            set(engine.model.module.state_dict()),
            sorted(engine.tied),
            dtypes,
        )
    return found


def legacy_learns(bench):
    """Return the loss of examples over steps, and how log-probs of rollouts change by steps on one batch."""
    sft = bench.engine_of(algorithm={"name": "sft", "optimizer": {"lr": 5e-2}})
    examples = [sft.train_step(batch_for("sft")) for _ in range(8)]
    cosine = {"schedule": "cosine", "schedule_steps": 50, "lr": 3e-3}
    policy = bench.engine_of(
        engine={"compute_dtype": "bfloat16"},
        model={"gradient_checkpointing": True},
        algorithm={"optimizer": cosine},
    )
    rollouts = samples.batch_of(4, (4, 2))
    before = log_probs(policy, rollouts)
    steps = [policy.train_step(rollouts) for _ in range(5)]
    gained = [float((b - a).sum()) for a, b in zip(before, log_probs(policy, rollouts), strict=True)]
    rewards = [row.reward for row in rollouts.experiences]
    dtypes = {str(tensor.dtype) for tensor in weights_of(policy).values()}
    return {"examples": examples, "steps": steps, "gained": gained, "rewards": rewards, "dtypes": dtypes}


REFUSED = {
    "attention": {"model": {"attn_implementation": "none"}},
    "no directory": {"model": {"path": "/nowhere/model"}},
}


def legacy_refused(bench):
    """Return what a model and a batch are refused with."""
    found = {
        name: refusal(lambda tables=tables: bench.engine_of(**tables)) for name, tables in REFUSED.items()
    }
    found["lacking"] = refusal(lambda: bench.engine_of("lacking"))
    found["rotary"] = refusal(lambda: bench.engine_of(model={"path": _newer_model(bench)}))
    engine = bench.engine_of()
    found["mixed"] = refusal(lambda: engine.train_step(samples.batch_of(1, examples=2)))
    rows = samples.batch_of(1)
    object.__setattr__(rows.experiences[0], "tokens", [samples.VOCAB] * len(rows.experiences[0].tokens))
    found["vocabulary"] = refusal(lambda: engine.train_step(rows))
    found["empty"] = refusal(lambda: engine.train_step(samples.batch_of(1, sizes=())))
    return found


def _newer_model(bench):
    """Return a model as transformers 5 writes it: with its base of rotary positions where version 4 does not look."""
    path = f"{bench.directory}/newer"
    shutil.copytree(f"{bench.models}/untied", path)
    with open(f"{path}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    return path
