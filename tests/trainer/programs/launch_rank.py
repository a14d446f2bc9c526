"""Ranks of the tests of launch, and a program that starts them: launch_rank.py JOB [--nproc N] [--rank FUNCTION]

Under torchrun or srun the same program is one rank. Each function of this file that takes a configuration and a
place can be the rank.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time

from syncd.errors import SyncdError
from syncd.jobfile.model import JobFile
from trainer.config import job_config
from trainer.launch.train import train
from trainer.stopping import StopSignals


def settle(config, _allowed=()):
    """Do what settling does for these tests: take another directory, made once."""
    if config.job.dir.endswith("refused"):
        raise SyncdError("this job is refused")
    os.mkdir(f"{config.job.dir}-settled")
    return config.model_copy(
        update={"job": config.job.model_copy(update={"dir": f"{config.job.dir}-settled"})}
    )


job_config.enter_job_dir = settle


def meet(config, place):
    """Join, add the ranks up, print what was found."""
    dist, torch = importlib.import_module("torch.distributed"), importlib.import_module("torch")
    join = importlib.import_module("trainer.launch.process_group").join

    with join(config, place) as joined:
        total = torch.tensor([float(place.rank + 1)])
        dist.all_reduce(total)
        told = joined.ranks.broadcast(f"from {place.rank}")
        gathered = joined.ranks.gather(place.rank)
        say(config, place, sum=total.item(), told=told, gathered=gathered, dir=joined.config.job.dir)
    assert not dist.is_initialized()
    return 0


def desert(config, place):
    """Rank 1 leaves after meeting; rank 0 goes on asking it."""
    with importlib.import_module("trainer.launch.process_group").join(config, place) as joined:
        while place.rank == 0:
            joined.ranks.gather(1)
    return 0


def say(config, place, **found):
    """Write what this rank has found to a file of its own."""
    found |= {"place": vars(place), "omp": os.environ.get("OMP_NUM_THREADS")}
    found |= {"tunables": os.environ.get("GLIBC_TUNABLES"), "pid": os.getpid()}
    with open(f"{os.environ['SAY']}/{place.rank}.json.part", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.rename(file.name, file.name.removesuffix(".part"))


def wait_for_stop(config, place):
    """Wait for a request to stop and end as the loop does after it has saved."""
    with StopSignals() as stop:
        say(config, place)
        ends = time.monotonic() + 60
        while stop.requested is None and time.monotonic() < ends:
            time.sleep(0.01)
        seen = 0
        for _ in range(20):  # a second one would raise KeyboardInterrupt here
            seen, stop.requested = seen + (stop.requested is not None), stop.requested
            time.sleep(0.01)
    print(f"rank {place.rank} was asked by {signal.Signals(stop.requested).name}", flush=True)
    return 75


def hang(config, place):
    """Take no notice of anything."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    say(config, place)
    time.sleep(120)
    return 0


def begin(config, place):
    """Be where torch is imported: nothing is open yet."""
    say(config, place)
    time.sleep(60)
    return 0


def flood(config, place):
    """Print far more than a pipe holds, in lines of their own and in one that never ends."""
    if place.rank:
        sys.stderr.write(
            "".join(f"line {number} of rank {place.rank} {'x' * 60}\n" for number in range(20000))
        )
        sys.stderr.write("y" * 200_000)
    else:
        print("rank 0 has the terminal", flush=True)
    return 0


def fail(config, place):
    """Rank 1 fails as a command fails; the others would go on."""
    if place.rank == 1:
        raise SyncdError("the disk is on fire", hint="call somebody")
    return wait_for_stop(config, place)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--rank", default="meet")
    parser.add_argument("--timeout", type=float, default=60)
    given = parser.parse_args()
    config = JobFile.model_validate(
        {
            "job": {"dir": given.job},
            "model": {"path": "none"},
            "engine": {"device": "cpu", "collective_timeout": given.timeout},
        }
    )
    try:
        return train(config, given.nproc, run=f"launch_rank:{given.rank}")
    except SyncdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
