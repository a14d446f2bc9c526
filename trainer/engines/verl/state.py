"""Saves and loads the training state in verl's format: each rank's part of weights and optimizer, schedule, RNG."""

import contextlib
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

from syncd.errors import ConfigError, CorruptDataError, SyncdError
from syncd.jobfile.trainer_sections import OptimizerSection
from syncd.transports.ranks import Ranks
from trainer.engines.verl.reshard import fill_model, fill_optimizer
from trainer.safe_unpickle import load_plain, only_plain_data

if TYPE_CHECKING:
    from trainer.engines.verl.models import Model  # imports verl

_KINDS = ("model", "optim", "extra_state")
_NAME = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


def seed_generators(seed: int) -> None:
    """Begin the random states that a training state holds."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- the state that verl saves and restores
    torch.manual_seed(seed)


def training_files(
    model: "Model", ranks: Ranks, *, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Any]:
    """Return what each of this rank's files holds of one model, under the names that verl gives them.

    The tensors are the model's own, its weights those whose names in it are `wanted`. All ranks make the call.
    """
    manager = model.checkpoint_manager
    with warnings.catch_warnings(), _sharded(model):
        warnings.simplefilter("ignore")
        weights = model.module.state_dict()
        optimizer = model.optimizer.state_dict()
    for name in [name for name in weights if not wanted(name)]:
        del weights[name]
    scheduler = model.lr_scheduler.state_dict() if model.lr_scheduler is not None else None
    extra = {"lr_scheduler": scheduler, "rng": manager.get_rng_state()}
    ending = f"world_size_{ranks.world_size}_rank_{ranks.rank}.pt"
    return {
        f"{kind}_{ending}": content for kind, content in zip(_KINDS, (weights, optimizer, extra), strict=True)
    }


@contextlib.contextmanager
def _sharded(model: "Model") -> Iterator[None]:
    """Have an FSDP1 model give its parts as verl saves them, brought to its device first; FSDP2 always does."""
    from verl.utils import fsdp_utils  # noqa: PLC0415 - takes seconds, and tests of engines without verl import this

    if fsdp_utils.fsdp_version(model.module) != 1:
        yield
        return
    fsdp_utils.load_fsdp_model_to_gpu(model.module)
    state = ShardedStateDictConfig(offload_to_cpu=True)
    optimizer = ShardedOptimStateDictConfig(offload_to_cpu=True)
    with fsdp_utils.get_fsdp_state_ctx(model.module, StateDictType.SHARDED_STATE_DICT, state, optimizer):
        yield
    if model.engine_config.param_offload:
        fsdp_utils.offload_fsdp_model_to_cpu(model.module)


def load_state(model: "Model", directory: str, ranks: Ranks) -> None:
    """Resume from the files of a directory, written by any number of ranks; nothing that they pickle is run.

    Weights, optimizer and schedule are exact. Random states are exact for the same number of ranks; of another one,
    ranks below it take those of the same rank, and further ranks keep their own. An event says so.
    """
    written = _ranks_of(directory) or ranks.world_size
    for problem in ranks.gather(_problem(model, directory, written, ranks)):
        if problem is not None:
            raise problem
    try:
        if written == ranks.world_size:
            with only_plain_data(directory):
                model.load_checkpoint(directory, del_local_after_load=False)
        else:
            _load_resharded(model, directory, written, ranks)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CorruptDataError(f"the training state is not of this model: {error}", path=directory) from error


def _load_resharded(model: "Model", directory: str, written: int, ranks: Ranks) -> None:
    from verl.utils import fsdp_utils  # noqa: PLC0415 - as above

    for kind, fill in (("model", fill_model), ("optim", fill_optimizer)):
        paths = [_path(directory, kind, written, rank) for rank in range(written)]
        fill(model, [load_plain(path) for path in paths], ranks.rank)
    if model.engine_config.optimizer_offload:
        fsdp_utils.offload_fsdp_optimizer(model.optimizer)
    extra = load_plain(_path(directory, "extra_state", written, min(ranks.rank, written - 1)))
    if extra["lr_scheduler"] is not None and model.lr_scheduler is not None:
        model.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    if ranks.rank < written:
        model.checkpoint_manager.load_rng_state(extra["rng"])
    if ranks.rank == 0:
        text = "weights, optimizer and schedule are exact; random states of ranks are not"
        structlog.get_logger().warning(
            "training_state_resharded", ranks=ranks.world_size, written_by=written, exact=text
        )


def _problem(model: "Model", directory: str, written: int, ranks: Ranks) -> SyncdError | None:
    """Return what is wrong with the files that this rank reads. Their data is mapped, not read."""
    readable = [ranks.rank]
    if written != ranks.world_size:
        if model.engine_config.strategy != "fsdp2":
            hint = f"start {written} ranks, or `trainer export` the step and start a new job from that model"
            what = f"the training state was written by {written} ranks, and this run has {ranks.world_size}"
            return ConfigError(f"{what}: only fsdp2 can resume it", path=directory, hint=hint)
        readable = list(range(written))
    for kind in _KINDS:
        for path in (_path(directory, kind, written, rank) for rank in readable):
            try:
                load_plain(path)
            except CorruptDataError as error:
                return error
            except OSError as error:
                return CorruptDataError(f"the training state cannot be read: {error}", path=path)
    return None


def _path(directory: str, kind: str, written: int, rank: int) -> str:
    return f"{directory}/{kind}_world_size_{written}_rank_{rank}.pt"


def _ranks_of(directory: str) -> int | None:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    return next((int(match[1]) for match in map(_NAME.fullmatch, names) if match), None)


def apply_settings(optimizer: Any, section: OptimizerSection, scheduler: Any = None) -> None:
    """Set the settings of a loaded optimizer to those of the job's file, which may have changed since.

    If nothing has changed, every number is set to itself. `scheduler` is its loaded LambdaLR, None if rates stay.
    """
    factors = [1.0] * len(optimizer.param_groups)
    if scheduler is not None:
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler.base_lrs = [section.lr] * len(factors)
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] = section.lr * factor
        if scheduler is not None:
            group["initial_lr"] = section.lr
        group["weight_decay"], group["betas"] = section.weight_decay, tuple(section.betas)
    if scheduler is not None:
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # noqa: SLF001 - what get_last_lr returns
