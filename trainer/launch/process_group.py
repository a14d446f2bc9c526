"""Joins a rank to the others: its device, the process group, and the configuration that all ranks share."""

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # torch.distributed, for type checkers
from torch.distributed.rendezvous import rendezvous

from syncd.errors import DOCS, ConfigError, SyncdError, TimedOutError, TryAgainError, first_line
from syncd.jobfile.model import JobFile
from syncd.transports.ranks import RankGroup, Ranks, rank0_or_error
from trainer.config import job_config
from trainer.launch.rank_env import LISTENING, RankEnv

MEETING = 600.0
"""Seconds for all ranks to join: importing torch from a shared file system is slow on many nodes at once."""


def pick_device(name: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    count = 0 if name == "cpu" else torch.cuda.device_count()
    if name == "cuda" and not count:
        raise ConfigError(
            "engine.device is cuda, but no GPU is visible", hint="nvidia-smi; or --engine.device cpu"
        )
    if not count:
        return torch.device("cpu")
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {count} are visible",
            hint=f"start {count} ranks on a machine",
        )
    # If a launcher shows each rank only its own GPU, that GPU is number 0.
    return torch.device("cuda", local_rank if count > 1 else 0)


def open_ranks(rank_env: RankEnv, device: torch.device, timeout: float) -> Ranks:
    """Initialise `torch.distributed`, also for one rank, with a timeout of collectives in seconds."""
    os.environ.update(rank_env.variables() if rank_env.world_size > 1 else {})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = _meet(rank_env, min(timeout, MEETING))
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank_env.rank,
            world_size=rank_env.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
        return RankGroup(timeout) if rank_env.world_size > 1 else Ranks()
    except RuntimeError as error:
        raise _not_met(rank_env, error) from error


def _meet(rank_env: RankEnv, seconds: float) -> Store:
    timeout = timedelta(seconds=seconds)
    if rank_env.world_size == 1:
        return HashStore()
    if rank_env.origin != "trainer":
        # torchrun runs the store and names it in the environment.
        store: Store = next(rendezvous("env://", rank_env.rank, rank_env.world_size, timeout=timeout))[0]
        return store
    return TCPStore(
        rank_env.master_addr,
        rank_env.master_port,
        rank_env.world_size,
        is_master=rank_env.rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[LISTENING]) if rank_env.rank == 0 else None,
    )


def _not_met(rank_env: RankEnv, error: RuntimeError) -> SyncdError:
    where = f"{rank_env.master_addr}:{rank_env.master_port}"
    reason = first_line(error)
    if "EADDRINUSE" in reason:
        return TryAgainError(
            f"rank 0 cannot listen at {where}: another process does", hint="MASTER_PORT=<a free port>"
        )
    return TimedOutError(
        f"rank {rank_env.rank} of {rank_env.world_size} did not reach the others at {where}: {reason}",
        hint=f"all ranks must start within ten minutes and reach MASTER_ADDR:MASTER_PORT ({DOCS}/launch.md)",
    )


@dataclass(frozen=True)
class Joined:
    config: JobFile  # the configuration, the same on all ranks: `job.dir` is the directory of this run
    device: torch.device  # what this rank computes on
    ranks: Ranks  # talks to the others


@contextlib.contextmanager
def join(config: JobFile, rank_env: RankEnv, allowed: Collection[str] = ()) -> Iterator[Joined]:
    device = pick_device(config.engine.device, rank_env.local_rank)
    ranks = open_ranks(rank_env, device, config.engine.collective_timeout)
    try:
        yield Joined(share_config(config, rank_env, ranks, allowed), device, ranks)
    finally:
        ranks.close()


def share_config(config: JobFile, rank_env: RankEnv, ranks: Ranks, allowed: Collection[str] = ()) -> JobFile:
    """Return the configuration on all ranks; rank 0 enters the job directory, unless `trainer train` has done it."""
    if rank_env.origin == "trainer":
        return config
    entered = ranks.broadcast(rank0_or_error(ranks, job_config.enter_job_dir, config, allowed))
    assert entered is not None, "rank 0 has entered it"
    return entered
