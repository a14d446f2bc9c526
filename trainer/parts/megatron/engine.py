"""Megatron by verl: the training state in Megatron's own format, `dist_ckpt`, written part by part by its owners.

Megatron writes it with collectives, so not beside the training: each rank writes to its host's TMPDIR first, and the
files are copied to the job directory while training continues.
"""

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from syncd.errors import ConfigError, CorruptDataError, StorageError, SyncdError, storage_error
from trainer.engines.state_copy import TrainingState
from trainer.engines.verl.engine import VerlEngine
from trainer.engines.verl.models import quiet
from trainer.parts.megatron.model import MegatronModel, sizes_of
from trainer.safe_unpickle import load_plain, only_plain_data

_METADATA = "{}/dist_ckpt/.metadata"
_PARTS = ("model", "optimizer")


class MegatronVerlEngine(VerlEngine):
    """A model that Megatron splits: tensor, pipeline, context and expert parallelism, a distributed optimizer."""

    model: MegatronModel
    trains_adapters: ClassVar[bool] = False
    copies_training_state: ClassVar[bool] = False

    _scratch = ""

    @property
    def tied(self) -> Collection[str]:
        return ("lm_head.weight",) if self._text_config.tie_word_embeddings else ()

    def training_state(self) -> TrainingState:
        self._remove_scratch()  # of the save before, which is done
        scratch = self._scratch = tempfile.mkdtemp(prefix="training-state-")
        try:
            with quiet():
                self.model.save_checkpoint(scratch)
        except OSError as error:
            raise storage_error(error, scratch) from error
        except RuntimeError as error:
            raise StorageError(f"the training state cannot be written: {error}", path=scratch) from error
        files: dict[str, Any] = {str(path.relative_to(scratch)): path for path in _files(Path(scratch))}
        return files | {self._own_file: self._own_state()}

    def load_training_state(self, directory: str) -> None:
        """Resume where it was written, by as many ranks that split the model in the same way; all of it is exact."""
        ranks = self.context.ranks
        for problem in ranks.gather(self._problem(directory)):
            if problem is not None:
                raise problem
        try:
            with quiet(), only_plain_data(directory):
                self.model.load_checkpoint(directory, del_local_after_load=False)
            self._apply(load_plain(f"{directory}/{self._own_file}", mapped=False))
        except (RuntimeError, ValueError, KeyError, AssertionError, OSError) as error:
            raise CorruptDataError(
                f"the training state is not of this model: {error}", path=directory
            ) from error

    def shutdown(self) -> None:
        super().shutdown()
        self._remove_scratch()

    @property
    def _own_file(self) -> str:
        ranks = self.context.ranks
        return f"extra_state_world_size_{ranks.world_size}_rank_{ranks.rank}.pt"

    def _own_state(self) -> dict[str, Any]:
        """Return what Megatron's format keeps once for several ranks, or not at all."""
        manager: Any = self.model.checkpoint_manager
        return {
            "sizes": sizes_of(self.context.config),
            "updates": self.model.lr_scheduler.num_steps,
            "rng": manager.get_rng_state(use_dist_ckpt=False),
        }

    def _apply(self, state: dict[str, Any]) -> None:
        """Take over a schedule and random states, with the settings of the job's file, which may have changed."""
        manager: Any = self.model.checkpoint_manager
        settings = self.context.config.algorithm.optimizer
        for group in self.model.optimizer.param_groups:
            group |= {"betas": tuple(settings.betas), "max_lr": settings.lr}
        self.model.lr_scheduler.num_steps = 0
        self.model.lr_scheduler.step(increment=state["updates"])  # sets learning rate and weight decay
        manager.load_rng_states(state["rng"], use_dist_ckpt=False)

    def _problem(self, directory: str) -> SyncdError | None:
        """Return what is wrong with a directory, as far as this rank sees before Megatron reads it."""
        path = f"{directory}/{self._own_file}"
        if not os.path.exists(path) and (names := _own_files(directory)):
            wrong = f"the training state was written by {len(names)} ranks"
            return self._other(directory, f"{wrong}, and this run has {self.context.ranks.world_size}")
        try:
            written = load_plain(path, mapped=False)["sizes"]
        except CorruptDataError as error:
            return error
        except (OSError, KeyError, TypeError) as error:
            return CorruptDataError(f"the training state cannot be read: {error}", path=path)
        if written != (own := sizes_of(self.context.config)):
            name = next(name for name in own if written.get(name) != own[name])
            return self._other(directory, f"it was written with {name} = {written.get(name)}")
        lost = [file for file in map(_METADATA.format, _PARTS) if not os.path.exists(f"{directory}/{file}")]
        return CorruptDataError(f"the training state has no {lost[0]}", path=directory) if lost else None

    @staticmethod
    def _other(directory: str, what: str) -> ConfigError:
        hint = "start as it was written, or `trainer export` the step and start a new job from that model"
        return ConfigError(f"{what}: megatron resumes as it was written", path=directory, hint=hint)

    def _remove_scratch(self) -> None:
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _own_files(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("extra_state_")]
