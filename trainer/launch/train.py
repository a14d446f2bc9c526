"""`trainer train`: starts the ranks of this machine, or is one rank under torchrun or srun.

The program of a rank that it starts is this module, `trainer.launch.train MODULE:FUNCTION JOB`.
"""

import os
import pkgutil
import sys
import traceback
from collections.abc import Collection

from syncd.console import print_error
from syncd.errors import SyncdError, UsageError, storage_error
from syncd.extras import not_installed
from syncd.jobfile.model import JobFile
from trainer.config import job_config
from trainer.launch.machine import count_ranks
from trainer.launch.rank_env import RankEnv, read_rank_env
from trainer.launch.supervisor import start_ranks
from trainer.stopping import INTERRUPTED, end_at_once

RUN = "trainer.run:run_rank"
"""The function that is one rank: `(config: JobFile, rank_env: RankEnv) -> int`, imported when it is called."""

HANDED = "TRAINER_CONFIG"  # environment variable in which ranks find the configuration, as JSON


def train(config: JobFile, nproc: int | None = None, *, run: str = RUN, allowed: Collection[str] = ()) -> int:
    """Train as the configuration says and return the exit code.

    `nproc` ranks start here, if not `trainer.nproc`; `run` is the function of one rank, as `module:name`.
    """
    rank_env = read_rank_env(os.environ)
    if rank_env.origin == "alone":
        return _start(config, nproc, run, allowed)
    if nproc is not None:
        raise UsageError(f"--nproc {nproc}: {rank_env.origin} started the {rank_env.world_size} ranks")
    return run_here(config, rank_env, run, allowed)


def run_here(config: JobFile, rank_env: RankEnv, run: str, allowed: Collection[str] = ()) -> int:
    end_at_once()
    more = {"allowed": allowed} if allowed else {}
    code: int = pkgutil.resolve_name(run)(config, rank_env, **more)
    return code


def _start(config: JobFile, nproc: int | None, run: str, allowed: Collection[str]) -> int:
    settled = job_config.enter_job_dir(config, allowed)
    count = count_ranks(nproc or settled.trainer.nproc, settled.engine.device, os.environ)
    # The directory is for people who read a list of processes.
    rank = [sys.executable, "-P", "-m", "syncd.trainer_program", "trainer.launch.train"]
    return start_ranks(
        [*rank, run, settled.job.dir],
        count,
        {**os.environ, HANDED: settled.model_dump_json(exclude_unset=True)},
    )


def main(run: str) -> int:
    config = JobFile.model_validate_json(os.environ[HANDED])
    try:
        return run_here(config, read_rank_env(os.environ), run)
    except SyncdError as error:
        return _print_error(error)
    except OSError as error:
        return _print_error(storage_error(error, config.job.dir))
    except ModuleNotFoundError as error:
        if missing := not_installed(error, "trainer"):
            return _print_error(missing)
        raise
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(error: SyncdError) -> int:
    if os.environ.get("SYNCD_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    print_error(error)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
