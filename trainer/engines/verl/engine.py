"""verl's FSDP engines behind the trainer's interface. `build` imports verl, once the device is known."""

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trainer.engines.base import Metrics
from trainer.engines.files import FileEngine
from trainer.engines.verl.checks import check
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits

if TYPE_CHECKING:
    from trainer.engines.verl.learner import Learner
import json

from syncd.errors import storage_errors
from trainer.config.model_files import read_model_config


class VerlEngine(FileEngine):
    """FSDP2 or FSDP by verl, without Ray: ranks are processes of torchrun, srun, or `trainer train`."""

    _learner: "Learner"

    def build(self) -> None:
        """Build model, optimizer and schedule; with `kl_coef`, a reference model too.

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
            CorruptDataError: It has tokens outside the vocabulary, or too many updates in a row were not finite.
            ConfigError: The algorithm cannot take it.
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
        """Resume exactly where it was written.

        Raises:
            ConfigError: It was written by another number of ranks.
            CorruptDataError: It is not whole; on all ranks.
        """
        self._learner.load(directory)

    def log_probs(self, batch: Batch) -> list[torch.Tensor]:
        """Return the log-probs of each experience's response tokens at the job's temperature, on all ranks."""
        return self._learner.log_probs(batch)

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each token after the first of each row, at temperature 1, on all ranks."""
        return self._learner.token_logprobs(rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress verl's messages at import about engines that are not used, and its log below warnings."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # each of its modules reads it when it is imported
    logging.getLogger("torch.fx._symbolic_trace").setLevel(
        logging.ERROR
    )  # to authors of models, in each process
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* engine is not available", UserWarning)
        yield


_NAMES = frozenset({
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json",
    "preprocessor_config.json",
})  # fmt: skip
_SUFFIXES = (".model", ".tiktoken", ".jinja")
_CODE = ".py"


def companions(path: str, dtype: str, *, code: bool) -> dict[str, bytes]:
    """Return files of a model directory by name, all but the weights.

    Args:
        path: The model directory.
        dtype: Of the weights beside them; config.json names it.
        code: Whether to include the model's own code.

    Raises:
        ConfigError: It is not a model directory.
        StorageError: A file cannot be read.
    """
    config = read_model_config(path) | {"dtype": dtype, "torch_dtype": dtype}
    found = {"config.json": json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}
    suffixes = (*_SUFFIXES, _CODE) if code else _SUFFIXES
    with storage_errors(path):
        for name in sorted(os.listdir(path)):
            if name in _NAMES or name.endswith(suffixes):
                with open(os.path.join(path, name), "rb") as file:
                    found[name] = file.read()
    return found
