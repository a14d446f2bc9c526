"""Saves and loads the training state in verl's format: each rank's part of weights and optimizer, schedule, RNG."""

import contextlib
import os
import pickle
import re
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from syncd.errors import ConfigError, CorruptDataError, StorageError, SyncdError, storage_error
from syncd.transports.ranks import Ranks
from trainer.config.model import OptimizerSection

if TYPE_CHECKING:
    from trainer.engines.verl.models import Model  # imports verl

_KINDS = ("model", "optim", "extra_state")
_NAME = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


def save_state(model: "Model", directory: str, ranks: Ranks) -> None:
    """Write this rank's files into a directory.

    Raises:
        StorageError: They cannot be written.
    """
    try:
        model.save_checkpoint(directory)
    except OSError as error:
        raise storage_error(error, directory) from error
    except RuntimeError as error:
        raise StorageError(f"the training state cannot be written: {error}", path=directory) from error
    beside = os.path.join(directory, "huggingface")
    if ranks.rank == 0:  # config and tokenizer are in actor/ already
        shutil.rmtree(beside, ignore_errors=True)
    _forget_locks(directory, beside)


def _forget_locks(*directories: str) -> None:
    """Remove what verl's `local_mkdir_safe` locks while it makes a directory: it leaves a file in /tmp for each."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(tempfile.gettempdir(), f"ckpt_{hash(directory) & 0xFFFFFFFF:08x}.lock"))


def load_state(model: "Model", directory: str, ranks: Ranks) -> None:
    """Resume from the files of a directory.

    Raises:
        ConfigError: Another number of ranks wrote them.
        CorruptDataError: A file is missing or damaged; on all ranks.
    """
    for problem in ranks.gather(_problem(directory, ranks)):
        if problem is not None:
            raise problem
    try:
        model.load_checkpoint(directory, del_local_after_load=False)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CorruptDataError(f"the training state is not of this model: {error}", path=directory) from error


def _problem(directory: str, ranks: Ranks) -> SyncdError | None:
    """Return what is wrong with this rank's files. Their data is mapped, not read."""
    written = _ranks_of(directory)
    if written not in (None, ranks.world_size):
        hint = f"start {written} ranks, or `trainer export` the step and start a new job from that model"
        message = f"the training state was written by {written} ranks, and this run has {ranks.world_size}"
        return ConfigError(message, path=directory, hint=hint)
    for kind in _KINDS:
        path = os.path.join(directory, f"{kind}_world_size_{ranks.world_size}_rank_{ranks.rank}.pt")
        try:
            torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            return CorruptDataError(f"the training state cannot be read: {error}", path=path)
    return None


def _ranks_of(directory: str) -> int | None:
    """Return the number of ranks that wrote a directory, None if unknown."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    return next((int(found[1]) for found in map(_NAME.fullmatch, names) if found), None)


def apply_settings(optimizer: Any, section: OptimizerSection, scheduler: Any = None) -> None:
    """Set the settings of a loaded optimizer to those of the job's file, which may have changed since.

    If nothing has changed, every number is set to itself.

    Args:
        optimizer: AdamW of torch, its state loaded.
        section: The settings.
        scheduler: Its LambdaLR, its state loaded; None for a constant rate.
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
