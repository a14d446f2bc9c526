"""Replay: a share of each batch is drawn from what was trained on before."""

import random
from collections.abc import Mapping
from typing import Any

from syncd.errors import ConfigError
from trainer.experience.batch import Batch
from trainer.experience.cursor import fields_of
from trainer.experience.fifo import Fifo
from trainer.experience.limits import Limits
from trainer.experience.pool import Group, files_of, group_document, load_groups


class Replay:
    """Fresh groups first in, first out, mixed with groups drawn from a bounded buffer of used ones.

    The batches of buffered groups stay on disk until these leave the buffer, so a state names them only.

    Args:
        fresh: Where fresh groups come from.
        capacity: Groups of the buffer; the oldest leave it first.
        share: The share of a batch's groups that is drawn from the buffer, as far as it has them.
        seed: Of the draws.

    Raises:
        ConfigError: An argument is out of range.
    """

    KIND = "replay"

    def __init__(self, fresh: Fifo, *, capacity: int, share: float, seed: int = 0) -> None:
        if capacity < 1 or not 0 <= share < 1:
            raise ConfigError(
                f"replay out of range: capacity {capacity}, share {share}", hint="0 <= share < 1"
            )
        self._fresh, self._capacity, self._share, self._seed = fresh, capacity, share, seed
        self._buffer: list[Group] = []
        self._draws = 0

    def limit(self, limits: Limits) -> None:
        """Set batches aside from now on that the model cannot take."""
        self._fresh.limit(limits)

    def sample(self, step: int, *, generation: int) -> Batch | None:
        """Return fresh groups and drawn ones after them, None while there are not enough fresh ones."""
        now, sampling = (generation, step), self._fresh.sampling
        usable = [group for group in self._buffer if not sampling.staleness.is_stale(group.experiences, now)]
        old = min(int(self._share * sampling.groups), len(usable))
        fresh = self._fresh.take(sampling.groups - old, now)
        if fresh is None:
            return None
        # One generator a draw, named by its number: the number is all of its state.
        drawn = random.Random(f"{self._seed}/{self._draws}").sample(usable, old)  # noqa: S311 -- no secret
        self._draws += 1
        self._buffer = [*usable, *fresh][-self._capacity :]
        return self._fresh.batch([*fresh, *drawn], now)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the fresh ones, where the buffered groups are stored, and the number of draws."""
        buffer = [group_document(group, group.since) for group in self._buffer]
        return {"kind": self.KIND, "fresh": self._fresh.state_dict(), "buffer": buffer, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the buffered groups again and go on with the next draw."""
        fields = fields_of(state, self.KIND)
        self._fresh.load_state_dict(fields.record("fresh").document)
        self._draws = fields.integer("draws")
        reader = self._fresh.reader
        self._buffer = load_groups(fields.records("buffer"), reader.load, reader.clock.monotonic())

    def commit(self, state: Mapping[str, Any]) -> int:
        """Let go of the batches that neither wait nor are buffered in the saved state."""
        fields = fields_of(state, self.KIND)
        keep = frozenset(files_of(fields.records("buffer")))
        return self._fresh.commit(fields.record("fresh").document, keep)

    def metrics(self) -> dict[str, float]:
        """Return those of the fresh ones and the length of the buffer."""
        return {**self._fresh.metrics(), "experience/replay_groups": float(len(self._buffer))}
