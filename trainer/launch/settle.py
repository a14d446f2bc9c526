"""Settles where the job lives and keeps its resolved configuration: once for all ranks, before they use either."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from syncd.errors import SyncdError, storage_error
from trainer.config.job_config import enter_job_dir
from trainer.config.model import JobConfig
from trainer.launch.rank_env import Place

if TYPE_CHECKING:
    from syncd.transports.ranks import Ranks  # imports torch, which whoever starts ranks does without


def settle(config: JobConfig, allowed: Collection[str] = ()) -> JobConfig:
    """Return the configuration with the job directory that this run uses, and keep it there.

    Args:
        config: What the user wrote.
        allowed: Fixed keys that the user lets change.

    Raises:
        ConfigError: The run contradicts the one of that directory.
        StorageError: The directory cannot be made or written.
    """
    return enter_job_dir(config, allowed)


def settle_together(
    config: JobConfig, place: Place, ranks: "Ranks", allowed: Collection[str] = ()
) -> JobConfig:
    """Return the settled configuration on all ranks; rank 0 settles it, unless whoever started us has.

    Raises:
        SyncdError: Rank 0 could not; the other ranks end with its exit code and leave it to say why.
    """
    if place.origin == "trainer":
        return config
    outcome = ranks.broadcast(_attempt(config, allowed) if ranks.rank == 0 else None)
    if isinstance(outcome, SyncdError):
        raise outcome if ranks.rank == 0 else SystemExit(outcome.exit_code)
    if outcome is None:
        raise AssertionError("rank 0 broadcasts what it has settled")
    return outcome


def _attempt(config: JobConfig, allowed: Collection[str]) -> JobConfig | SyncdError:
    try:
        return settle(config, allowed)
    except SyncdError as error:
        return error
    except OSError as error:
        return storage_error(error, config.job.dir)
