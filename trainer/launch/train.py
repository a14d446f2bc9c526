"""`trainer train`: alone it starts the ranks of this machine, under torchrun or srun it is one."""

import os
import pkgutil
import sys
from collections.abc import Collection

from syncd.errors import UsageError
from trainer.config.model import JobConfig
from trainer.launch import settle
from trainer.launch.machine import count_ranks
from trainer.launch.rank_env import Place, place_from
from trainer.launch.start import start_ranks
from trainer.stopping import end_at_once

RUN = "trainer.run:run_rank"
"""The function that is one rank: `(config: JobConfig, place: Place) -> int`, imported when it is called."""

HANDED = "TRAINER_CONFIG"
"""Environment variable in which ranks find the settled configuration, as JSON."""


def train(
    config: JobConfig, nproc: int | None = None, *, run: str = RUN, allowed: Collection[str] = ()
) -> int:
    """Train as the configuration says and return the exit code.

    Args:
        config: What the user wrote.
        nproc: How many ranks to start here, if not `trainer.nproc`.
        run: The function of one rank, as `module:name`.
        allowed: Fixed keys that the user lets change.

    Raises:
        ConfigError: The environment describes half a rank, or the run contradicts the one of its directory.
        UsageError: `nproc` is given and the ranks have been started already.
    """
    place = place_from(os.environ)
    if place.origin == "alone":
        return _start(config, nproc, run, allowed)
    if nproc is not None:
        raise UsageError(f"--nproc {nproc}: {place.origin} has started the {place.world_size} ranks")
    return run_here(config, place, run, allowed)


def run_here(config: JobConfig, place: Place, run: str, allowed: Collection[str] = ()) -> int:
    """Be one rank and return its exit code."""
    end_at_once()
    more = {"allowed": allowed} if allowed else {}
    code: int = pkgutil.resolve_name(run)(config, place, **more)
    return code


def _start(config: JobConfig, nproc: int | None, run: str, allowed: Collection[str]) -> int:
    settled = settle.settle(config, allowed)
    count = count_ranks(nproc or settled.trainer.nproc, settled.engine.device, os.environ)
    # The directory is for whoever reads a list of processes.
    command = [sys.executable, "-m", "trainer.launch.rank", run, settled.job.dir]
    return start_ranks(command, count, {**os.environ, HANDED: settled.model_dump_json()})
