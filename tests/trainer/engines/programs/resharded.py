"""Ranks of one world size after the other train a policy and its critic: resharded.py DIRECTORY MODELS WORLD_SIZE ...

Each leg loads what the one before has saved, trains a step and saves again; the first saves by verl itself. There is
no critic with a release of verl that can have none. What each rank found is written to DIRECTORY/<leg>.<rank>.pt.
Ranks are forks of this process, which imports verl once.
"""

import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from support import engine_cases, samples
from support.verl_release import LACKS

import trainer.engines.verl.engine  # noqa: F401 - what ranks would import each
from syncd.transports.ranks import RankGroup, Ranks

SCHEDULE = {"optimizer": {"schedule": "cosine", "warmup_steps": 2, "lr": 1e-2}}
HAS_CRITIC = not LACKS.whole_value_loss
TABLES = {
    "algorithm": {"name": "ppo" if HAS_CRITIC else "grpo"} | SCHEDULE,
    "critic": {"enabled": True} | SCHEDULE if HAS_CRITIC else {},
    "trainer": {"total_steps": 9},
}


def whole(value):
    """Return a copy of a state with whole tensors."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def state_of(engine):
    """Return what a training state holds of each model, of all ranks."""
    return [_model_state(model) for model in models_of(engine).values()]


def models_of(engine):
    """Return the models by the directory that each has in a training state."""
    return {"": engine.model} | ({"critic": engine._critic.model} if engine._critic is not None else {})


def _model_state(model):
    optimizer = model.optimizer.state_dict()
    return {
        "model": whole(dict(model.module.state_dict())),
        "optimizer": whole(optimizer["state"]),
        "groups": optimizer["param_groups"],
        "schedule": model.lr_scheduler.state_dict(),
    }


def leg(bench, number):
    engine = bench.engine_of(**TABLES)
    found = {}
    if number:
        engine.load_training_state(bench.place(f"leg-{number - 1}"))
        found["loaded"], found["rng"] = state_of(engine), torch.get_rng_state()
    metrics = engine.train_step(samples.batch_of(number))
    found |= {"saved": state_of(engine), "rng saved": torch.get_rng_state(), "metrics": metrics}
    if number:
        engine_cases.write_state(engine, bench.place(f"leg-{number}"))
    else:
        for name, model in models_of(engine).items():
            model.save_checkpoint(os.path.join(bench.place("leg-0"), name))
    engine.shutdown()
    return found


def run_rank(directory, models, number, rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous-{number}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=240),
    )  # fmt: skip
    ranks = RankGroup(240) if world_size > 1 else Ranks()
    bench = engine_cases.Bench(directory, "verl", models, "cpu", ranks)
    torch.save(leg(bench, number), f"{directory}/{number}.{rank}.pt")
    dist.destroy_process_group()


def run_forks(count, run):
    """Run ranks in forks of this process, each with its number; exit if one fails."""
    ranks = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                run(rank)
            except BaseException:  # noqa: BLE001 -- whatever it is, the test is told
                traceback.print_exc()
                os._exit(1)
            sys.stderr.flush()
            os._exit(0)
        ranks.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(ended):
        sys.exit(1)


def main(directory, models, *world_sizes):
    for number, world_size in enumerate(map(int, world_sizes)):
        run_forks(
            world_size, lambda rank, n=number, size=world_size: run_rank(directory, models, n, rank, size)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
