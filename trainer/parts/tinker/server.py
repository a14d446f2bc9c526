"""What the engine asks of a tinker server: gradients, updates, log-probs, and keeping what was trained."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from syncd.errors import CorruptDataError, NonFiniteError
from syncd.parts.tinker.session import SCHEME, TinkerSession
from trainer.parts.tinker.rows import TinkerRow

_EPS = 1e-8  # of AdamW, as in torch

T = TypeVar("T")


class TrainingServer:
    """A model on a tinker server that this process trains: an adapter of a base model, with its optimizer.

    Attention and MLP layers get adapters of `rank`, the unembedding none: servers that load adapters take no others.
    """

    def __init__(self, session: TinkerSession, base_model: str, rank: int, seed: int) -> None:
        self.session, self.base_model, self.rank = session, base_model, rank
        create = session.service.create_lora_training_client
        self._client = session.call(
            "creating a model", lambda: create(base_model, rank=rank, seed=seed, train_unembed=False)
        )

    def update(
        self,
        rows: Sequence[TinkerRow],
        loss: str,
        bounds: Mapping[str, float],
        optimizer: Mapping[str, float],
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Make one update with the gradient of a loss; both requests are on their way at once.

        Return the log-probs of each row's targets before the update, and what the server says of the update.
        """
        data, settings = self._data(rows), dict(bounds) or None
        adam = self.session.types.AdamParams(**optimizer, eps=_EPS)
        # Sent in a bounded thread each: the SDK may wait for the server before it returns an answer to wait for.
        gradient = self.session.call(
            "a gradient", lambda: self._client.forward_backward(data, loss, settings)
        )
        update = self.session.call("an update", lambda: self._client.optim_step(adam))
        output = self.session.result("a gradient", gradient)
        metrics = dict(self.session.result("an update", update).metrics or {})
        return _logprobs(output, rows), metrics

    def logprobs(self, rows: Sequence[TinkerRow]) -> list[torch.Tensor]:
        """Return the log-probs of each row's targets at temperature 1, float32; nothing on the server changes."""
        data = self._data(rows)
        return _logprobs(self._do("log-probs", lambda: self._client.forward(data, "cross_entropy")), rows)

    def save_weights(self, name: str) -> str:
        """Have the server keep the present weights for sampling; return their address."""
        return _address(self._do("saving weights", lambda: self._client.save_weights_for_sampler(name)))

    def save_state(self, name: str) -> str:
        """Have the server keep weights and optimizer; return their address."""
        return _address(self._do("saving the training state", lambda: self._client.save_state(name)))

    def load_state(self, address: str) -> None:
        self._do("loading the training state", lambda: self._client.load_state_with_optimizer(address))

    def archive_url(self, address: str) -> str:
        model, _, name = address.removeprefix(SCHEME).partition("/")
        rest = self.session.call("opening a session", self.session.service.create_rest_client)
        name = name.removeprefix("sampler_weights/")
        archive = self.session.result("finding the adapter", rest.get_checkpoint_archive_url(model, name))
        return str(archive.url)

    def _do(self, what: str, send: Callable[[], Any]) -> Any:
        return self.session.result(what, self.session.call(what, send))

    def _data(self, rows: Sequence[TinkerRow]) -> list[Any]:
        types = self.session.types
        return [
            types.Datum(
                model_input=self.session.tokens(list(row.tokens)),
                loss_fn_inputs={
                    column.name: types.TensorData(
                        data=column.values.tolist(),
                        dtype="int64" if column.values.dtype == torch.int64 else "float32",
                        shape=[len(column.values)],
                    )
                    for column in row.columns
                },
            )
            for row in rows
        ]


def _logprobs(output: Any, rows: Sequence[TinkerRow]) -> list[torch.Tensor]:
    values = [
        torch.tensor(row_logprobs["logprobs"].tolist(), dtype=torch.float32)
        for row_logprobs in output.loss_fn_outputs
    ]
    if [len(row_logprobs) for row_logprobs in values] != [len(row.tokens) for row in rows]:
        raise CorruptDataError("the tinker server returned log-probs of other rows than it was sent")
    if not all(row_logprobs.isfinite().all() for row_logprobs in values):
        hint = "resume from an earlier checkpoint with a lower algorithm.optimizer.lr"
        raise NonFiniteError("the model on the tinker server has log-probs that are not finite", hint=hint)
    return values


def _address(saved: Any) -> str:
    if not (isinstance(saved.path, str) and saved.path.startswith(SCHEME)):
        raise CorruptDataError(
            f"the tinker server keeps weights at {saved.path!r}, which is no {SCHEME} address"
        )
    return saved.path


def finite_norm(metrics: Mapping[str, float]) -> float | None:
    """Return the norm of the gradient that a server says it has applied, None if it says none."""
    norm = next((value for name, value in metrics.items() if name.rpartition("/")[2] == "grad_norm"), None)
    if norm is not None and not math.isfinite(norm):
        hint = "resume from an earlier checkpoint with a lower algorithm.optimizer.lr"
        raise NonFiniteError("the tinker server applied a gradient that is not finite", hint=hint)
    return norm
