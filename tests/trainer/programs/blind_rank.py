"""A rank whose job directory does not show explorers any more."""

from syncd.errors import StorageError
from trainer import run
from trainer.waiting import ExplorerLiveness


def have_left(_explorers):
    raise StorageError("stale file handle")


def run_rank(config, place):
    """Be one rank."""
    ExplorerLiveness.have_left = have_left
    return run.run_rank(config, place)
