"""Makes a step that verl saved with FSDP2 a full checkpoint of a new job, which `trainer train` resumes from.

The training state of the engine `verl` has verl's own format: the files of each rank. Each is unpickled by
`weights_only`, checked, and written again, so nothing that a file may hold is run, neither here nor at the resume.
"""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from syncd.errors import ConfigError, CorruptDataError, UsageError, storage_errors
from syncd.jobfile.model import JobFile
from syncd.protocol.disk import list_if_there
from syncd.protocol.layout import ACTOR, Job
from trainer.checkpoints import TrainerState, begin_training, complete, sync_files
from trainer.engines.state_copy import write_files
from trainer.export import export
from trainer.export.fsdp import rank_files, without_warning
from trainer.safe_unpickle import RUNS_CODE, SAFE

_KINDS = ("model", "optim", "extra_state")
_SCRATCH = ".import"  # in the job directory, until its weights are published
_WEIGHTS_ONLY = "for the weights alone: leave out --resume"


def write_full_checkpoint(config: JobFile, source: str, step: int) -> None:
    """Write a step of verl's job with FSDP's files in `actor/` as a full checkpoint of a new job, or nothing."""
    _check_config(config, source)
    root, files = config.job.dir, RankFiles(f"{Job.at(source).step(step)}/{ACTOR}")
    files.check(config)
    with storage_errors(root):
        _claim(root)
    try:
        _publish(config, source, step)
        _write_training(Job.at(root, config.job.state_dir or None), files, step)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _claim(root: str) -> None:
    """Make the job directory, with a directory of this import: of several at once, one makes that."""
    os.makedirs(root, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{root}/{_SCRATCH}")
        if os.listdir(root) == [_SCRATCH]:
            return
        os.rmdir(f"{root}/{_SCRATCH}")
    raise UsageError("the job directory is not empty", path=root, hint="give --job.dir DIR")


class RankFiles:
    """The training state in `model_`, `optim_` and `extra_state_world_size_W_rank_R.pt`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        disk = Job.at(directory).disk
        self.world_size = len(rank_files(disk, directory))
        there = {entry.name for entry in list_if_there(disk, directory)}
        if lacking := sorted(set(self.names()) - there):
            raise ConfigError(f"the step has no {lacking[0]}", path=directory, hint=_WEIGHTS_ONLY)

    def names(self) -> Iterator[str]:
        for rank in range(self.world_size):
            for kind in _KINDS:
                yield f"{kind}_world_size_{self.world_size}_rank_{rank}.pt"

    def load(self, name: str) -> Any:
        """Return what a file holds; its data is mapped, not read."""
        path = f"{self._directory}/{name}"
        try:
            with without_warning(), torch.serialization.safe_globals(SAFE):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(RUNS_CODE, path=path, hint=_WEIGHTS_ONLY) from error
        except (RuntimeError, EOFError, OSError) as error:
            raise CorruptDataError("not a complete file of torch.save", path=path) from error

    def check(self, config: JobFile) -> None:
        for name in self.names():
            state = self.load(name)
            if name.startswith("model"):
                self._check_weights(state, config, name)
            elif name.startswith("optim"):
                self._check_optimizer(state, name)

    def _check_weights(self, tensors: Any, config: JobFile, name: str) -> None:
        if any("lora_" in key for key in tensors):
            self._refuse(name, "adapters are not resumed")
        dtypes = {
            str(tensor.dtype).removeprefix("torch.")
            for tensor in tensors.values()
            if tensor.is_floating_point()
        }
        if dtypes != {config.model.dtype}:
            there = ", ".join(sorted(dtypes))
            self._refuse(name, f"its weights are {there}, and model.dtype is {config.model.dtype}")

    def _check_optimizer(self, state: Any, name: str) -> None:
        if not isinstance(state, Mapping) or not state.get("state"):
            self._refuse(name, "it holds no state of an optimizer")
        spread = any(
            isinstance(tensor, DTensor) for values in state["state"].values() for tensor in values.values()
        )
        if not spread:
            self._refuse(name, "it is no state of fsdp2, and of others none is resumed")

    def _refuse(self, name: str, why: str) -> None:
        raise ConfigError(why, path=f"{self._directory}/{name}", hint=_WEIGHTS_ONLY)


def _check_config(config: JobFile, source: str) -> None:
    if config.engine.name != "verl" or config.engine.strategy != "fsdp2":
        what = f"{config.engine.name} with {config.engine.strategy}"
        raise ConfigError(
            f"only verl with fsdp2 is resumed, and this job is of {what}", path=source, hint=_WEIGHTS_ONLY
        )
    if config.critic.enabled or config.model.lora.rank:
        what = "critics" if config.critic.enabled else "adapters"
        raise ConfigError(f"{what} are not resumed", path=source, hint=_WEIGHTS_ONLY)


def _publish(config: JobFile, source: str, step: int) -> None:
    """Publish the weights of the step as the job will publish its own, so that explorers begin with them."""
    root, scratch = config.job.dir, f"{config.job.dir}/{_SCRATCH}"
    state = ["--state-dir", config.job.state_dir] if config.job.state_dir else []
    export(source, step, scratch, config.model.dtype if config.sync.dtype == "keep" else config.sync.dtype)
    command = [sys.executable, "-P", "-m", "syncd", "publish", root, str(step), scratch, *state]
    done = subprocess.run(  # noqa: S603 - our own command
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise CorruptDataError(f"step {step} could not be published: exit code {done.returncode}", path=root)
    shutil.rmtree(scratch)


def _write_training(job: Job, files: RankFiles, step: int) -> None:
    save = uuid.uuid4().hex
    directory = begin_training(job, save)
    with storage_errors(directory):
        for name in files.names():
            write_files({name: files.load(name)}, directory)
    sync_files(job, directory, list(files.names()))
    state = TrainerState(step, generation=1, world_size=files.world_size)
    complete(job, step, state.document(), save=save)
