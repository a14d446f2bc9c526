"""A rank whose job directory does not show explorers any more."""

from syncd.errors import StorageError
from trainer import run
from trainer.explorer_liveness import Audience


def look(_audience):
    raise StorageError("stale file handle")


def run_rank(config, place):
    """Be one rank."""
    Audience.look = look
    return run.run_rank(config, place)
