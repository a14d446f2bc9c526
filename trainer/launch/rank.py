"""The program of a rank that `trainer train` starts: `python -m trainer.launch.rank MODULE:FUNCTION JOB`."""

import os
import sys
import traceback

from syncd.console import print_error
from syncd.errors import SyncdError, storage_error
from syncd.extras import not_installed
from trainer.config.model import JobConfig
from trainer.launch.rank_env import read_rank_env
from trainer.launch.train import HANDED, run_here
from trainer.stopping import INTERRUPTED


def main(run: str) -> int:
    """Run this rank and return its exit code; errors are printed as the command line prints them."""
    config = JobConfig.model_validate_json(os.environ[HANDED])
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
