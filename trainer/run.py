"""One rank, from its start to its exit code."""

import sys
from collections.abc import Collection
from contextlib import ExitStack, nullcontext

from syncd.client.client import Client
from syncd.errors import SyncdError
from syncd.observe.log import configure
from syncd.protocol.layout import Job
from syncd.transports.ranks import Ranks
from trainer.config.model import JobConfig
from trainer.engines.all_or_error import agreed, is_known
from trainer.engines.base import EngineContext, make_engine
from trainer.launch.daemon import start_daemon
from trainer.launch.join import Joined, join
from trainer.launch.rank_env import Place
from trainer.lock import TrainerLock
from trainer.loop import Trainer
from trainer.loop_state import TrainerState
from trainer.rank0 import Head
from trainer.reporting.report import Screen
from trainer.resume import FRESH, find_state
from trainer.sampling import make_strategy
from trainer.stopping import StopSignals


def run_rank(config: JobConfig, place: Place, allowed: Collection[str] = ()) -> int:
    """Train as one rank; return its exit code.

    Args:
        config: The job's file, its job directory settled.
        place: Which rank this is, and where the others are.
        allowed: Fixed keys that the user lets change, where the job directory is not settled yet.

    Raises:
        SyncdError: What ended the run, on the rank that tells it.
    """
    configure("warning" if place.rank else "info", sys.stderr)
    with StopSignals() as stop, join(config, place, allowed) as joined, ExitStack() as opened:
        try:
            return _train(joined, stop, opened)
        except SyncdError as error:
            if joined.ranks.rank and is_known(error):
                return error.exit_code
            raise


def _train(joined: Joined, stop: StopSignals, opened: ExitStack) -> int:
    config, ranks = joined.config, joined.ranks
    job = Job.at(config.job.dir, config.job.state_dir or None)
    locks: list[TrainerLock] = []
    agreed(
        ranks, lambda: None if ranks.rank else locks.append(opened.enter_context(TrainerLock.acquire(job)))
    )
    state = _found_state(job, ranks)
    heads: list[Head] = []
    agreed(ranks, lambda: None if ranks.rank else _open_head(config, job, locks[0], state, opened, heads))
    head = heads[0] if heads else None
    sync = head.sync if head else None
    fence = ranks.broadcast(sync.fence if sync else "")
    lease = sync.lease if sync else nullcontext
    context = EngineContext(config, job, ranks, joined.device, lease, sync, fence)
    trainer = Trainer(make_engine(context), context, stop, state, head)
    trainer.prepare()
    code = trainer.train()
    trainer.shutdown()
    return code


def _found_state(job: Job, ranks: Ranks) -> TrainerState:
    found = [FRESH]

    def find() -> None:
        if ranks.rank == 0:
            found[0] = find_state(job)

    agreed(ranks, find)
    return ranks.broadcast(found[0])


def _open_head(
    config: JobConfig,
    job: Job,
    lock: TrainerLock,
    state: TrainerState,
    opened: ExitStack,
    heads: list[Head],
) -> None:
    daemon = start_daemon(config)
    if daemon is not None:
        opened.callback(lambda: daemon.close(tidy=any(head.is_finished for head in heads)))
    state_dir = config.job.state_dir or None
    sync = Client.open(
        job.root,
        "trainer",
        config.trainer.name,
        state_dir=state_dir,
        timeout=config.sync.timeout,
        fence=lock.fence,
    )
    opened.enter_context(sync)
    screen = Screen(config, state.step)
    opened.callback(screen.close)

    def tend() -> None:
        lock.check()
        if daemon is not None:
            daemon.check()

    heads.append(Head(config, sync, make_strategy(config, job), screen, tend=tend))
