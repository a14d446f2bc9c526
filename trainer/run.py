"""One rank, from its start to its exit code."""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch.distributed as dist

from syncd.client.client import Client
from syncd.errors import SyncdError
from syncd.jobfile.model import JobFile
from syncd.observe.log import configure
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.transports.ranks import RankGroup, Ranks, is_agreed, lost_rank, rank0_or_error
from trainer.engines.base import EngineContext, TrainEngineWrapper, make_engine
from trainer.launch.daemon import DaemonProcess, start_daemon
from trainer.launch.process_group import Joined, join, open_ranks, pick_device
from trainer.launch.rank_env import RankEnv, read_rank_env
from trainer.lock import TrainerLock
from trainer.loop import Trainer
from trainer.rank0 import Rank0
from trainer.reporting.report import Screen
from trainer.resume import FRESH, find_state
from trainer.sampling import make_strategy
from trainer.stopping import StopSignals
from trainer.waiting import DaemonWait


def run_rank(config: JobFile, rank_env: RankEnv, allowed: Collection[str] = ()) -> int:
    """Train as one rank; return its exit code. Fixed keys in `allowed` may change if the job is not settled yet."""
    configure("warning" if rank_env.rank else "info", sys.stderr)
    with StopSignals() as stop:
        try:
            with join(config, rank_env, allowed) as joined, _trainer_of(joined, stop) as trainer:
                trainer.prepare()
                code = trainer.train()
                trainer.shutdown()
        except SyncdError as error:
            if rank_env.rank and is_agreed(error):
                return error.exit_code
            raise
        except RuntimeError as error:
            if (lost := lost_rank(error)) is not None:
                raise lost from error
            raise
        return code


def open_trainer(config: JobFile) -> Trainer:
    """Return the trainer of this rank, joined to its job; its `shutdown` leaves the job.

    The process is one rank of torchrun or srun, or alone. No signal is handled: callers end the trainer themselves.
    """
    with ExitStack() as opened:
        joined = opened.enter_context(join(config, read_rank_env(os.environ)))
        trainer = opened.enter_context(_trainer_of(joined, StopSignals()))
        trainer.resources = opened.pop_all()
    return trainer


def get_trainer_wrapper(config: JobFile) -> TrainEngineWrapper:
    """Return the engine that `engine.name` names, for this rank; call `prepare` before its other methods.

    The process is one rank of torchrun or srun, or alone. If `torch.distributed` is not initialised yet, it is
    initialised here, and ends with the process. The engine writes below `job.dir`, which
    `trainer.config.job_config.enter_job_dir` prepares on one rank.

    Raises:
        ConfigError: There is no such engine, or this rank has no device.
        TimedOutError: The other ranks did not join.
    """
    rank_env = read_rank_env(os.environ)
    device = pick_device(config.engine.device, rank_env.local_rank)
    timeout = config.engine.collective_timeout
    ranks: Ranks
    if not dist.is_initialized():
        ranks = open_ranks(rank_env, device, timeout)
    else:
        ranks = RankGroup(timeout) if dist.get_world_size() > 1 else Ranks()
    return make_engine(
        EngineContext(config, Job.at(config.job.dir, config.job.state_dir or None), ranks, device)
    )


@contextmanager
def _trainer_of(joined: Joined, stop: StopSignals) -> Iterator[Trainer]:
    """Yield the trainer of a rank; afterwards the job is left, and our daemon ends."""
    config, ranks = joined.config, joined.ranks
    job = Job.at(config.job.dir, config.job.state_dir or None)
    is_finished = False
    with rank0_or_error(ranks, TrainerLock.acquire, job) or nullcontext() as lock:
        daemon = rank0_or_error(ranks, start_daemon, config)
        try:
            with ExitStack() as opened:
                state = ranks.broadcast(rank0_or_error(ranks, find_state, job)) or FRESH
                rank0 = rank0_or_error(ranks, _open_rank0, config, lock, daemon, state.step, opened)
                client = rank0.client if rank0 else None
                fence = ranks.broadcast(client.fence if client else "")
                context = EngineContext(config, job, ranks, joined.device, client, fence)
                trainer = Trainer(make_engine(context), context, stop, state, rank0)
                yield trainer
                is_finished = trainer.exit_code == 0
        finally:
            if daemon is not None:
                daemon.close(tidy=is_finished)


def _open_rank0(
    config: JobFile, lock: TrainerLock | None, daemon: DaemonProcess | None, step: int, opened: ExitStack
) -> Rank0:
    """Join the job, and open what only rank 0 has; `opened` closes all of it."""
    assert lock is not None
    checks = [lock.check] if daemon is None else [lock.check, daemon.check]
    job = Job.at(config.job.dir, config.job.state_dir or None)
    client = Client.open(
        config.job.dir,
        "trainer",
        config.trainer.name,
        state_dir=config.job.state_dir or None,
        timeout=config.sync.timeout,
        fence=lock.fence,
        on_wait=DaemonWait(job, SystemClock(), checks),
    )
    opened.enter_context(client)
    screen = Screen(config, step, lock.check)
    opened.callback(screen.close)
    return Rank0(config, client, make_strategy(config, client.job), screen, checks=checks)
