"""A model on a tinker server behind the trainer's interface: what learns is there, samples and steps are here."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from syncd.errors import ConfigError, UsageError, storage_errors
from syncd.parts.tinker.session import TinkerSession, api_key
from syncd.protocol.adapter_base import find_base
from syncd.protocol.documents import encode, read_document
from syncd.protocol.probe import Probe
from syncd.protocol.writer import StepWriter
from syncd.transports.base import FILES, WeightSender
from syncd.transports.host_memory import HostMemory
from trainer.config.attention import text_config
from trainer.config.model_files import read_model_config
from trainer.engines.base import EngineContext, Metrics
from trainer.engines.files import FileEngine
from trainer.engines.state_copy import TrainingState
from trainer.engines.verl.checks import resolve
from trainer.engines.verl.rows import check_vocabulary, prepare_step, token_row
from trainer.experience.batch import Batch
from trainer.experience.limits import Limits
from trainer.parts.tinker.adapter import (
    CONFIG,
    WEIGHTS,
    TinkerAdapter,
    adapter_tensors,
    download_adapter,
)
from trainer.parts.tinker.config import options_of
from trainer.parts.tinker.rows import TinkerRow, example_row
from trainer.parts.tinker.server import TrainingServer
from trainer.parts.tinker.updates import TinkerUpdates

_STATE = "tinker.json"


class TinkerEngine(FileEngine):
    """Trains an adapter on a tinker server; its steps are addresses on the server, or the adapter's files."""

    copies_training_state: ClassVar[bool] = False

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._options = options_of(context.config)
        self._key = api_key(self._options.key_env)  # now: a missing one is found before anything is built
        self._session: TinkerSession | None = None

    def build(self) -> None:
        config, options = self.context.config, self._options
        if options.publish == "lora":
            self.base = find_base(self.context.job, config.model.path)
        session = self._session = TinkerSession(options.url, self._key, options.timeout)
        name, longest = session.base_model(options.base_model)
        read = read_model_config(config.model.path)
        vocabulary = text_config(read).get("vocab_size")
        self._limits = Limits(
            vocabulary if type(vocabulary) is int else None, longest, "the tinker server's model"
        )
        self._server = TrainingServer(session, name, options.rank, config.job.seed)
        self._updates = TinkerUpdates(config, resolve(config.algorithm), self._server, options.reduction)

    def open_senders(self, memory: HostMemory) -> Mapping[str, WeightSender]:
        """Return none: nothing is sent from here, since the weights are on the server."""
        del memory
        return {}

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def export_dtype(self) -> str:
        """Return `keep`: the server's weights are published as they are."""
        return "keep"

    def train(self, batch: Batch, step: int) -> Metrics:
        """Train on the whole batch; the server has made each update when this returns."""
        del step  # the server keeps no numbers
        algorithm = self._updates.algorithm
        prepared = prepare_step(algorithm, batch, mixed=False)
        if self._limits.vocabulary is not None:
            check_vocabulary(prepared.rows, self._limits.vocabulary)
        done = self._updates.run(prepared)
        return prepared.figures.over(self.context.ranks) | done | prepared.described(algorithm)

    def sync_weight(self, method: str, *, is_checkpoint: bool = False) -> None:
        """Have the server keep the weights, and publish their address or the adapter as a step."""
        del is_checkpoint  # its steps are addresses or adapters, never deltas
        self.wait_for_save()
        if self._handed == self.train_step_num:
            return
        if method != FILES:
            hint = 'sync.method = "checkpoint"'
            raise UsageError(
                f"the engine tinker cannot sync by {method!r}: its weights are on the server", hint=hint
            )
        if self._announced_again():
            return
        self._attempt, self._handed = self._new_attempt(), None
        self._publish(self._measured_probe(self.token_logprobs))
        self._handed = self.train_step_num

    def save_checkpoint(
        self, state: Mapping[str, Any], *, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Publish the weights, and save all that a resume needs; a Hugging Face directory needs base weights."""
        del save_as_hf
        super().save_checkpoint(state, block_until_saved=block_until_saved)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the adapter by peft's names; the base weights never leave the server."""
        yield from adapter_tensors(self._adapter(self._server.save_weights(self._name()))).items()

    def companions(self) -> Mapping[str, bytes]:
        """Return nothing: what belongs to the weights is on the server, or in the adapter."""
        return {}

    def training_state(self) -> TrainingState:
        """Have the server keep weights and optimizer; return where, as the content of one file."""
        server = self._server
        document = {
            "protocol": 1,
            "address": server.save_state(self._name()),
            "base_model": server.base_model,
            "rank": server.rank,
            "updates": self._updates.made,
        }
        return {_STATE: encode(document)}

    def load_training_state(self, directory: str) -> None:
        path = f"{directory}/{_STATE}"
        with storage_errors(path):
            document = read_document(self.context.job.disk, path)
        kept, here = (
            (document.text("base_model"), document.integer("rank")),
            (self._server.base_model, self._server.rank),
        )
        if kept != here:
            text = (
                f"a training state of {kept[0]}, rank {kept[1]}, where {here[0]}, rank {here[1]} is trained"
            )
            raise ConfigError(text, path=path, hint="engine.options.base_model and engine.options.rank")
        self._server.load_state(document.text("address"))
        self._updates.made = document.integer("updates")

    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        asked: list[TinkerRow] = [example_row(token_row(row), 1.0) for row in rows]
        return [row_logprobs.tolist() for row_logprobs in self._server.logprobs(asked)]

    def shutdown(self) -> None:
        """Finish the save in flight, then end the session; what the server has kept stays there."""
        super().shutdown()
        if self._session is not None:
            self._session.close()

    def _publish(self, probe: Probe | None) -> None:
        context, step = self.context, self.train_step_num
        address = self._server.save_weights(self._name())
        writer = StepWriter(context.job, step, 1, self._attempt, fence=context.fence, base=self.base)
        with storage_errors(writer.path):
            writer.begin()
            try:
                if self._options.publish == "lora":
                    _seal_adapter(writer, self._adapter(address), probe)
                else:
                    writer.receipt(1, [], probe=probe)
                    writer.seal(kind="remote", uri=address)
            except BaseException:
                writer.discard()
                raise
            writer.announce()

    def _adapter(self, address: str) -> TinkerAdapter:
        url, options, model = self._server.archive_url(address), self._options, self.context.config.model.path
        return self._server.session.call(
            "downloading the adapter", lambda: download_adapter(url, model, options.timeout)
        )

    def _name(self) -> str:
        """Return a name for what the server is to keep now that nothing else there has."""
        return f"step-{self.train_step_num}-{self._new_attempt()[:12]}"


def _seal_adapter(writer: StepWriter, adapter: TinkerAdapter, probe: Probe | None) -> None:
    shard = writer.write(f"actor/{WEIGHTS}", adapter.weights, tensors=adapter.tensors)
    writer.receipt(1, [shard], [writer.write(f"actor/{CONFIG}", adapter.config)], probe=probe)
    writer.seal(kind="lora")
