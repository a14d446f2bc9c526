"""The one interface of training engines, and how one is found by its name.

An engine is registered under the entry point group `trainer.engines` as a callable that takes an `EngineContext`.
All ranks make the same calls in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from syncd.client.client import Client
from syncd.errors import ConfigError, UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from syncd.transports.base import Sent, WeightSender
from syncd.transports.ranks import Ranks
from trainer.experience.batch import Batch
from trainer.experience.limits import UNLIMITED, Limits
from trainer.plugins import ENGINES

Metrics = dict[str, float]
"""Figures of a step by name, such as `actor/pg_loss`; the same on all ranks, or rank 0's count."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is opened with.

    Args:
        ranks: The ranks of this trainer; `torch.distributed` is initialised where there is more than one.
        device: The device of this rank, `cpu` or `cuda:<n>`.
        client: The trainer's connection to the job; None on all ranks but the first.
        fence: The directory through which this trainer seals and announces; it is removed when another takes over.
    """

    config: JobFile
    job: Job
    ranks: Ranks
    device: torch.device
    client: Client | None = None
    fence: str = ""


class TrainEngineWrapper(ABC):
    """A training engine: trains on batches, and publishes its weights.

    Most engines derive from `trainer.engines.files.FileEngine`, which saves what `export` walks over.
    """

    train_step_num: int
    """Steps trained so far, over all starts."""

    senders: Mapping[str, WeightSender] = MappingProxyType({})
    """The senders of this run by the names of their transports; the same names on all ranks."""

    @abstractmethod
    def prepare(self) -> None:
        """Build the model and the optimizer; `train_step_num` is 0 afterwards.

        Raises:
            ConfigError: The configuration asks for what the engine cannot do here.
        """

    @property
    def limits(self) -> Limits:
        """Return what of a row the model can take, once it is built: the loop sets other batches aside."""
        return UNLIMITED

    @abstractmethod
    def train_step(self, batch: Batch) -> Metrics:
        """Train on the whole batch, the same on all ranks; each rank takes its share of the rows."""

    @property
    def step_times(self) -> Metrics:
        """Return seconds of parts of the last step, by names that begin with `timing_s/`; rank 0's count."""
        return {}

    @abstractmethod
    def sync_weight(self, method: str, *, is_checkpoint: bool = False) -> None:
        """Publish the weights as the step `train_step_num` by a transport; return once training may continue.

        Args:
            method: The name of one of `senders`.
            is_checkpoint: Whether the step becomes a full checkpoint: then it is stored whole.

        Raises:
            SyncdError: This save or the one before it failed; on all ranks.
        """

    def save_state_dict(self) -> None:
        """Publish the weights through files."""
        self.sync_weight("checkpoint")

    def upload_state_dict(self) -> None:
        """Publish the weights, and leave a copy of them in this host's memory."""
        self.sync_weight("memory")

    def sync_weight_nccl(self) -> None:
        """Publish the weights, and broadcast them to the explorers that take part."""
        self.sync_weight("nccl")

    @abstractmethod
    def save_checkpoint(
        self, state: Mapping[str, Any], *, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Save all that a resume needs, and publish the weights with it.

        Args:
            state: The loop's own state, plain JSON, kept beside the engine's.
            block_until_saved: Return only once it is durable.
            save_as_hf: Add a complete Hugging Face directory.

        Raises:
            SyncdError: This save or the one before it failed; on all ranks.
        """

    @property
    @abstractmethod
    def saved_step(self) -> int:
        """Return the newest full checkpoint that is known to be durable, 0 before the first; rank 0's counts."""

    @abstractmethod
    def load_checkpoint(self, step: int) -> None:
        """Resume exactly from the full checkpoint of a step; `train_step_num` is that step afterwards.

        Raises:
            SyncdError: It cannot be loaded, or not by this number of ranks; the message names both.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return once no save is in flight.

        Raises:
            SyncdError: A save failed; on all ranks.
        """

    @property
    def save_failed(self) -> bool:
        """Return whether this rank knows already that the save in flight has failed; `wait_for_save` raises why."""
        return False

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last sync, None while it is unknown; rank 0's counts."""
        return None

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each token after the first of each row, at temperature 1, on all ranks.

        All ranks take part. It computes in the dtype of training and without dropout, and changes neither weights nor
        random states. An engine that has it sends a probe with each version.
        """
        raise UsageError(f"{type(self).__name__} does not support log-probs of tokens")

    def record_start(self) -> None:
        """Record the baseline, once a job: what the model answers before the first step."""

    @property
    def sync_metrics(self) -> Metrics:
        """Return metrics of the last sync; rank 0's count."""
        return {}

    def shutdown(self) -> None:
        """Finish the save in flight, then give threads and memory back."""


def make_engine(context: EngineContext) -> TrainEngineWrapper:
    """Return the engine that the configuration names.

    Raises:
        ConfigError: There is none of this name, or it cannot be imported.
    """
    name = context.config.engine.name
    engine = ENGINES.get(name)(context)
    if not isinstance(engine, TrainEngineWrapper):
        raise ConfigError(f"entry point {name!r} of {ENGINES.group} makes no TrainEngineWrapper")
    return engine
