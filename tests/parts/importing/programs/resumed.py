"""A step that verl's own checkpoint manager saved becomes a full checkpoint of a new job: resumed.py DIRECTORY MODELS

Two ranks train, verl saves, and they train on: that is what a run without interruption does. Then
`trainer import --resume` makes a job of what verl saved, and two ranks resume it and train on the same batches. What
each rank found is written to DIRECTORY/<leg>.<rank>.pt. Ranks are forks of this process, which imports verl once.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from resharded import run_forks, state_of
from support import samples

from syncd.protocol.layout import Job
from syncd.transports.ranks import RankGroup
from trainer.cli.main import run
from trainer.config.load import load_config
from trainer.engines.base import make_engine
from trainer.resume import find_state

STEP, MORE = 2, 2
CONFIG = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 3},
    "actor_rollout_ref": {
        "model": {"path": "MODEL"},
        "actor": {
            "strategy": "fsdp2", "ppo_mini_batch_size": 3, "ppo_micro_batch_size_per_gpu": 8, "use_kl_loss": True,
            "optim": {"lr": 0.01, "lr_warmup_steps": 3, "lr_scheduler_type": "cosine", "total_training_steps": 9},
            "fsdp_config": {"model_dtype": "float32", "dtype": "float32"},
        },
        "rollout": {"name": "vllm", "n": 4},
    },
    "trainer": {"total_training_steps": 9},
}  # fmt: skip


def imported(directory, name, *more):
    """Import the configuration as `name`.toml, with a job of the same name; return the exit code."""
    where = ["--to", f"{directory}/{name}.toml", "--job.dir", f"{directory}/{name}"]
    return run(["import", f"{directory}/verl.json", *where, "--engine.device", "cpu", *more])


def engine_of(path, ranks):
    config = load_config(path)
    engine = make_engine(samples.context_of(config, ranks))
    engine.prepare()
    return engine, Job.at(config.job.dir)


def trained(engine, numbers):
    return [engine.train_step(samples.batch_of(number)) for number in numbers]


def uninterrupted(directory, ranks):
    """Train, have verl save its own step, and train on."""
    engine, _ = engine_of(f"{directory}/before.toml", ranks)
    trained(engine, range(STEP))
    engine.model.save_checkpoint(f"{directory}/verl/global_step_{STEP}/actor")
    saved = state_of(engine)
    return engine, {"saved": saved, "metrics": trained(engine, range(STEP, STEP + MORE))}


def resumed(directory, ranks):
    """Resume the imported job as `trainer train` does, and train on."""
    engine, job = engine_of(f"{directory}/after.toml", ranks)
    state = find_state(job)
    engine.load_checkpoint(state.step)
    found = {"state": state.document(), "rng": torch.get_rng_state()}
    return engine, found | {"metrics": trained(engine, range(STEP, STEP + MORE))}


def leg(work, directory, ranks):
    engine, found = work(directory, ranks)
    found["trained"] = state_of(engine)
    engine.shutdown()
    return found


def run_rank(work, directory, number, rank):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous-{number}", rank=rank, world_size=2
    )
    torch.save(leg(work, directory, RankGroup(240)), f"{directory}/{number}.{rank}.pt")
    dist.destroy_process_group()


def main(directory, models):
    CONFIG["actor_rollout_ref"]["model"]["path"] = f"{models}/dropout"
    with open(f"{directory}/verl.json", "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    assert imported(directory, "before") == 0
    os.mkdir(f"{directory}/before")
    run_forks(2, lambda rank: run_rank(uninterrupted, directory, 0, rank))
    step = f"{directory}/verl/global_step_{STEP}"
    assert imported(directory, "after", "--from-checkpoint", step, "--resume") == 0
    run_forks(2, lambda rank: run_rank(resumed, directory, 1, rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
