"""What a rank does first and last: takes its device, meets the others, agrees on the job, and leaves them."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from syncd.transports.ranks import Ranks
from trainer.config.model import JobConfig
from trainer.launch.process_group import open_ranks, pick_device
from trainer.launch.rank_env import Place
from trainer.launch.settle import settle_together


@dataclass(frozen=True)
class Joined:
    """A rank among the others.

    Args:
        config: The settled configuration, the same on all ranks: `job.dir` is the directory of this run.
        device: What this rank computes on.
        ranks: Talks to the others.
    """

    config: JobConfig
    device: torch.device
    ranks: Ranks


@contextlib.contextmanager
def join(config: JobConfig, place: Place, allowed: Collection[str] = ()) -> Iterator[Joined]:
    """Join the ranks for as long as the block lasts.

    Raises:
        SyncdError: The device is not there, the others did not come, or the job cannot be settled.
    """
    device = pick_device(config.engine.device, place.local_rank)
    ranks = open_ranks(place, device, config.engine.collective_timeout)
    try:
        yield Joined(settle_together(config, place, ranks, allowed), device, ranks)
    finally:
        ranks.close()
