"""Sample strategies beside `fifo`: `replay` of used groups, `mix` with SFT examples, and `sft`, examples only."""

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from syncd.errors import ConfigError
from trainer.experience.batch import Batch, SampleStrategy
from trainer.experience.cursor import fields_of
from trainer.experience.fifo import Fifo
from trainer.experience.limits import Limits
from trainer.experience.pool import RolloutGroup, files_of, group_document, load_groups
from trainer.experience.sft import Examples


class Replay(SampleStrategy):
    """Fresh groups first in, first out, mixed with groups drawn from a buffer of `capacity` used ones.

    The oldest leave the buffer first. Its batches stay on disk until then, so a state names them only. `share` of a
    batch's groups is drawn from the buffer, as far as it has them.
    """

    KIND = "replay"

    def __init__(self, fresh: Fifo, *, capacity: int, share: float, seed: int = 0) -> None:
        if capacity < 1 or not 0 <= share < 1:
            raise ConfigError(
                f"replay out of range: capacity {capacity}, share {share}", hint="0 <= share < 1"
            )
        self._fresh, self._capacity, self._share, self._seed = fresh, capacity, share, seed
        self._buffer: list[RolloutGroup] = []
        self._draws = 0

    def limit(self, limits: Limits) -> None:
        self._fresh.limit(limits)

    def sample(self, step: int, *, generation: int) -> Batch | None:
        now, sampling = (generation, step), self._fresh.sampling
        usable = [
            group for group in self._buffer if not self._fresh.staleness.is_stale(group.experiences, now)
        ]
        old = min(int(self._share * sampling.groups), len(usable))
        fresh = self._fresh.pop_groups(sampling.groups - old, now)
        if fresh is None:
            return None
        # One generator a draw, named by its number: the number is all of its state.
        drawn = random.Random(f"{self._seed}/{self._draws}").sample(usable, old)  # noqa: S311 -- no secret
        self._draws += 1
        self._buffer = [*usable, *fresh][-self._capacity :]
        return self._fresh.batch([*fresh, *drawn], now)

    def preparing(self) -> AbstractContextManager[None]:
        return self._fresh.preparing()

    def state_dict(self) -> dict[str, Any]:
        buffer = [group_document(group, group.since) for group in self._buffer]
        return {"kind": self.KIND, "fresh": self._fresh.state_dict(), "buffer": buffer, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = fields_of(state, self.KIND)
        self._fresh.load_state_dict(fields.record("fresh").document)
        self._draws = fields.integer("draws")
        reader = self._fresh.reader
        self._buffer = load_groups(fields.records("buffer"), reader.load, reader.clock.monotonic())

    def commit(self, state: Mapping[str, Any]) -> int:
        fields = fields_of(state, self.KIND)
        keep = frozenset(files_of(fields.records("buffer")))
        return self._fresh.commit(fields.record("fresh").document, keep)

    def metrics(self) -> dict[str, float]:
        return {**self._fresh.metrics(), "experience/replay_groups": float(len(self._buffer))}


class Mix(SampleStrategy):
    """Adds SFT examples, `ratio` of the whole batch, to each batch of another strategy."""

    KIND = "mix"

    def __init__(self, strategy: SampleStrategy, examples: Examples, *, ratio: float) -> None:
        if not 0 < ratio < 1:
            raise ConfigError(f"ratio {ratio} of SFT examples is not between 0 and 1")
        self._strategy, self._examples, self._ratio = strategy, examples, ratio

    @property
    def over(self) -> str:
        return self._strategy.over

    def limit(self, limits: Limits) -> None:
        self._examples.check(limits)
        self._strategy.limit(limits)

    def sample(self, step: int, *, generation: int) -> Batch | None:
        batch = self._strategy.sample(step, generation=generation)
        if batch is None:
            return None
        count = round(len(batch.firsts) * self._ratio / (1 - self._ratio))
        return replace(batch, examples=self._examples.draw(count))

    def preparing(self) -> AbstractContextManager[None]:
        return self._strategy.preparing()

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.KIND,
            "strategy": self._strategy.state_dict(),
            "examples": self._examples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = fields_of(state, self.KIND)
        self._examples.load_state_dict(fields.record("examples").document)
        self._strategy.load_state_dict(fields.record("strategy").document)

    def commit(self, state: Mapping[str, Any]) -> int:
        return self._strategy.commit(fields_of(state, self.KIND).record("strategy").document)

    def metrics(self) -> dict[str, float]:
        return self._strategy.metrics()


class Supervised(SampleStrategy):
    """Supervised training: `count` examples a step, for `epochs` passes over the data set; 0 for no end."""

    KIND = "sft"

    def __init__(self, examples: Examples, count: int, epochs: int) -> None:
        self._examples, self._count, self._epochs = examples, count, epochs

    @property
    def over(self) -> str:
        is_over = 0 < self._epochs * len(self._examples) <= self._examples.taken
        return "all epochs done" if is_over else ""

    def limit(self, limits: Limits) -> None:
        self._examples.check(limits)

    def sample(self, step: int, *, generation: int) -> Batch | None:  # noqa: ARG002 - examples have no age
        return None if self.over else Batch((), (), (), (), (), self._examples.draw(self._count))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.KIND, "examples": self._examples.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._examples.load_state_dict(fields_of(state, self.KIND).record("examples").document)

    def metrics(self) -> dict[str, float]:
        return {"data/epoch": self._examples.taken / len(self._examples)}
