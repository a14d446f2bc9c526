"""A training engine for one's own loop, by the name that users of Trinity-RFT know."""

import os

import torch.distributed as dist

from syncd.protocol.layout import Job
from syncd.transports.ranks import RankGroup, Ranks
from trainer.config.model import JobConfig
from trainer.engines.base import EngineContext, TrainEngineWrapper, make_engine
from trainer.launch.process_group import open_ranks, pick_device
from trainer.launch.rank_env import read_rank_env


def get_trainer_wrapper(config: JobConfig) -> TrainEngineWrapper:
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
