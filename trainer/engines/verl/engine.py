"""verl's FSDP engines behind the trainer's interface. `build` imports verl: not before the device is known."""

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from trainer.engines.base import Metrics
from trainer.engines.files import FileEngine
from trainer.engines.verl.checks import check
from trainer.engines.verl.companions import companions
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits

if TYPE_CHECKING:
    from trainer.engines.verl.learner import Learner


class VerlEngine(FileEngine):
    """FSDP2 or FSDP by verl, without Ray: ranks are processes of torchrun, srun, or `trainer train`."""

    _learner: "Learner"

    def build(self) -> None:
        """Build model, optimizer and schedule; with `kl_coef`, a second model that stands still.

        Raises:
            ConfigError: The configuration asks for what verl cannot do here.
        """
        context = self.context
        check(context.config, context.device.type)
        with _quiet():
            if context.device.type == "cpu":
                from trainer.engines.verl import platform  # noqa: PLC0415 -- verl is imported here, not before

                platform.install()
            from trainer.engines.verl.learner import Learner  # noqa: PLC0415 -- after the platform
        self._learner = Learner(context.config, context.ranks, context.device)

    @property
    def limits(self) -> Limits:
        """Return what of a row the model can take."""
        return self._learner.limits

    def train(self, batch: Batch, step: int) -> Metrics:
        """Train on the whole batch, the same on all ranks.

        Raises:
            CorruptDataError: It has tokens that the model does not have, or nothing finite comes of it any more.
            ConfigError: It is not what the algorithm takes.
        """
        return self._learner.train(batch, step)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the whole weights by their Hugging Face names, in the dtype that they have."""
        tensors, _ = self._learner.model.get_per_tensor_param()
        yield from tensors

    @property
    def tied(self) -> Collection[str]:
        """Return names in the export that repeat another tensor."""
        return self._learner.tied

    def companions(self) -> Mapping[str, bytes]:
        """Return config and tokenizer as they are at `model.path`, the config with the dtype of the steps."""
        config = self.context.config
        dtype = config.model.dtype if config.sync.dtype == "keep" else config.sync.dtype
        return companions(config.model.path, dtype, code=config.model.trust_remote_code)

    def save_training_state(self, directory: str) -> None:
        """Write this rank's part of weights and optimizer, the schedule and the RNG.

        Raises:
            StorageError: They cannot be written.
        """
        self._learner.save(directory)

    def load_training_state(self, directory: str) -> None:
        """Go on exactly where it was written.

        Raises:
            ConfigError: It was written by another number of ranks.
            CorruptDataError: It is not whole; on all ranks.
        """
        self._learner.load(directory)

    def log_probs(self, batch: Batch) -> list[torch.Tensor]:
        """Return the log-probs of each experience's response tokens at the job's temperature, on all ranks."""
        return self._learner.log_probs(batch)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep off stderr what verl's import has to say of engines that are not used, and its log below warnings."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # each of its modules looks when it is imported
    logging.getLogger("torch.fx._symbolic_trace").setLevel(
        logging.ERROR
    )  # to authors of models, in each process
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* engine is not available", UserWarning)
        yield
