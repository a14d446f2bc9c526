"""Opens `torch.distributed` for a rank: the device it computes on, where ranks meet, and the group of them all."""

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # torch.distributed, for type checkers
from torch.distributed.rendezvous import rendezvous

from syncd.errors import ConfigError, SyncdError, TimedOutError, TryAgainError
from syncd.transports.ranks import Alone, RankGroup, Ranks
from trainer.launch.rank_env import Place
from trainer.launch.supervisor import LISTENING

MEETING = 600.0
"""Seconds for all ranks to come: importing torch from a shared file system is slow on many nodes at once."""


def pick_device(name: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """Return the device of a rank: `cpu`, or the GPU of its number on this machine.

    Raises:
        ConfigError: A GPU is asked for, or there are some, and there is none for this rank.
    """
    count = 0 if name == "cpu" else torch.cuda.device_count()
    if name == "cuda" and not count:
        raise ConfigError(
            "engine.device is cuda, and no GPU is there", hint="nvidia-smi; or --engine.device cpu"
        )
    if not count:
        return torch.device("cpu")
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {count} are visible",
            hint=f"start {count} ranks on a machine",
        )
    # Where a launcher shows each rank its own GPU only, that one is number 0.
    return torch.device("cuda", local_rank if count > 1 else 0)


def open_ranks(place: Place, device: torch.device, timeout: float) -> Ranks:
    """Meet the other ranks and return what talks to them; `torch.distributed` is initialised, also for one rank.

    Args:
        place: Which rank this is.
        device: What `pick_device` returned.
        timeout: Seconds after which a collective that a rank does not join is an error.

    Raises:
        TimedOutError: Not all ranks came, within the timeout or ten minutes.
        TryAgainError: The port where they meet is taken.
    """
    os.environ.update(place.variables() if place.world_size > 1 else {})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = _meet(place, min(timeout, MEETING))
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
        return RankGroup(timeout) if place.world_size > 1 else Alone()
    except RuntimeError as error:
        raise _unmet(place, error) from error


def _meet(place: Place, seconds: float) -> Store:
    """Return the store through which ranks find each other."""
    timeout = timedelta(seconds=seconds)
    if place.world_size == 1:
        return HashStore()
    if place.origin != "trainer":
        # torchrun has a store of its own, and says so in the environment.
        store: Store = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))[0]
        return store
    return TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[LISTENING]) if place.rank == 0 else None,
    )


def _unmet(place: Place, error: RuntimeError) -> SyncdError:
    where = f"{place.master_addr}:{place.master_port}"
    said = str(error).splitlines()[0]
    if "EADDRINUSE" in said:
        return TryAgainError(
            f"rank 0 cannot listen at {where}: another process does", hint="MASTER_PORT=<a free port>"
        )
    return TimedOutError(
        f"rank {place.rank} of {place.world_size} has not met the others at {where}: {said}",
        hint="all ranks must start within ten minutes and reach MASTER_ADDR:MASTER_PORT (docs/launch.md)",
    )
