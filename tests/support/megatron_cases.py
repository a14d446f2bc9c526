"""Cases of Megatron on processors, for programs/run_cases.py: what two ranks found in each layout."""

import glob
import os

from support import megatron_on_cpu, samples
from support.engine_cases import content_of, equal, log_probs, planted, refusal, weights_of

megatron_on_cpu.install()

from trainer.parts.megatron.engine import MegatronVerlEngine  # noqa: E402

TENSOR, PIPELINE, DATA = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}
LAYOUTS = {"tensor": TENSOR, "pipeline": PIPELINE, "data": DATA}
"""How two ranks split a model, by options of the engine."""


def engine_of(bench, layout, which="even", /, **tables):
    """Return an engine of which ranks split the model in a way."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    options = {
        **LAYOUTS[layout],
        "sequence_parallel": False,
        "override_transformer_config": megatron_on_cpu.LAYERS,
    }
    engine = {"strategy": "megatron", "options": options} | tables.pop("engine", {})
    place = bench.place("job")
    config = samples.configured(f"{bench.models}/{which}", place, engine=engine, **tables)
    made = MegatronVerlEngine(samples.context_of(config, bench.ranks))
    made.prepare()
    return made


def megatron_layouts(bench):
    """Return what each layout found: weights, log-probs and steps; what two steps saved, and what came of it."""
    return {layout: _trained(bench, layout) for layout in LAYOUTS}


def _trained(bench, layout):
    engine = engine_of(bench, layout)
    found = {"start": weights_of(engine), "limits": engine.limits, "tied": sorted(engine.tied)}
    found["tokens"] = engine.token_logprobs([row.tokens for row in samples.batch_of(9).experiences])
    found["metrics"] = [engine.train_step(samples.batch_of(1))]
    found["after"] = weights_of(engine)
    found["metrics"] += [engine.train_step(samples.batch_of(2))]
    saved, found["saved"] = _write(bench, engine, f"{layout}-saved"), weights_of(engine)
    found["files"] = sorted(os.listdir(f"{saved}/model/dist_ckpt"))
    found["metrics"] += [engine.train_step(samples.batch_of(seed)) for seed in (3, 4)]
    found["end"], state = weights_of(engine), _optimizer_state(engine)
    straight = _write(bench, engine, f"{layout}-straight")
    engine.shutdown()
    again = engine_of(bench, layout)
    again.load_training_state(saved)
    found["again"] = [again.train_step(samples.batch_of(seed)) for seed in (3, 4)]
    found["end again"] = weights_of(again)
    resumed = _write(bench, again, f"{layout}-resumed")
    found["same state"] = _compared(straight, resumed) | {"optimizer": equal(state, _optimizer_state(again))}
    again.shutdown()
    return found


def _write(bench, engine, name):
    """Write a training state of all ranks into one directory."""
    from support.engine_cases import write_state

    place = bench.place(name)
    write_state(engine, place)
    bench.ranks.gather(None)
    return place


def _optimizer_state(engine):
    """Return what this rank's part of the optimizer holds for each of its parameters."""
    optimizers = [one.optimizer for one in engine.model.optimizer.chained_optimizers]
    return [
        {"weight": parameter.detach().clone(), **{name: value.clone() for name, value in own.items()}}
        for optimizer in optimizers
        for parameter, own in optimizer.state.items()
    ]


def _compared(one, other):
    """Say of files of a training state whether two are the same; those of the optimizer have padding of any value."""
    names = [os.path.relpath(path, one) for path in glob.glob(f"{one}/model/**/*.distcp", recursive=True)]
    names += [name for name in os.listdir(one) if name.endswith(".pt")]
    return {name: equal(*(content_of(f"{place}/{name}") for place in (one, other))) for name in names}


def megatron_other_layout(bench):
    """Load a state that other splits wrote, one with a file less, and one that a single rank could have written."""
    engine = engine_of(bench, "tensor")
    found = {"pipeline": refusal(lambda: engine.load_training_state(f"{bench.directory}/pipeline-saved"))}
    bench.ranks.gather(None)
    if bench.ranks.rank == 0:
        os.remove(f"{bench.directory}/tensor-saved/optimizer/dist_ckpt/.metadata")
    bench.ranks.gather(None)
    found["cut"] = refusal(lambda: engine.load_training_state(f"{bench.directory}/tensor-saved"))
    return found


def megatron_settings(bench):
    """Return what a resume has of a job's file that has changed since, and what a warm-up does."""
    usual = {"lr": 1e-2, "betas": (0.8, 0.95), "warmup_steps": 2, "schedule": "cosine", "schedule_steps": 9}
    engine = engine_of(bench, "tensor", algorithm={"optimizer": usual})
    rates = [engine.train_step(samples.batch_of(seed))["actor/lr"] for seed in (1, 2, 3, 4)]
    betas = {tuple(group["betas"]) for group in engine.model.optimizer.param_groups}
    place = _write(bench, engine, "settings")
    changed = engine_of(bench, "tensor", algorithm={"optimizer": {**usual, "lr": 2e-2, "betas": (0.7, 0.9)}})
    changed.load_training_state(place)
    after = changed.train_step(samples.batch_of(5))["actor/lr"]
    now = {tuple(group["betas"]) for group in changed.model.optimizer.param_groups}
    return {"rates": rates, "betas": betas, "changed": after, "now": now}


def megatron_job(bench):
    """Publish a step with a full checkpoint as a job does, resume from it, and skip what is not finite."""
    engine = engine_of(bench, "tensor")
    engine.train_step(samples.batch_of(1))
    before = weights_of(engine)
    engine.save_checkpoint({"cursor": 7}, block_until_saved=True)
    huge = engine.train_step(samples.batch_of(1, reward=3e38))
    kept = equal(before, weights_of(engine))
    later = engine.train_step(samples.batch_of(2))
    end = weights_of(engine)
    engine.shutdown()
    again = engine_of(bench, "tensor")
    again.load_checkpoint(1)
    resumed = equal(before, weights_of(again))
    again.train_step(samples.batch_of(2))
    found = {"huge": huge, "kept": kept, "later": later, "resumed": resumed, "step": again.train_step_num}
    return found | {"before": before, "same end": equal(end, weights_of(again))}


def megatron_planted(bench):
    """Resume with an object in each file of a full checkpoint in turn."""
    return planted(bench, engine_of(bench, "tensor", job={"dir": bench.place("planted")}))


def megatron_reference(bench):
    """Train with a reference model and with tied weights; return figures and the names of the export."""
    engine = engine_of(bench, "pipeline", "even-tied", algorithm={"kl_coef": 0.1})
    names = [name for name, _ in engine.export()]
    start = log_probs(engine, samples.batch_of(9))
    return {
        "names": names,
        "start": start,
        "metrics": [engine.train_step(samples.batch_of(seed)) for seed in (1, 2)],
        "tied": sorted(engine.tied),
        "weights": weights_of(engine),
    }
