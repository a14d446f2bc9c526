"""The sample strategy `fifo`: the oldest whole groups first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from syncd.errors import ConfigError
from syncd.protocol.version import Pair
from trainer.experience.batch import Batch, SampleStrategy
from trainer.experience.cursor import BatchFile, Origin, cursor_from, fields_of
from trainer.experience.limits import Limits
from trainer.experience.pool import GroupPool, RolloutGroup, files_of, group_document, load_groups
from trainer.experience.staleness import Staleness
from trainer.experience.store import ExperienceReader

if TYPE_CHECKING:
    from syncd.jobfile.sections import DataSection


class Fifo(SampleStrategy):
    KIND = "fifo"

    def __init__(self, reader: ExperienceReader, sampling: "DataSection", staleness: Staleness) -> None:
        if sampling.max_waiting < sampling.group_size * sampling.groups:
            raise ConfigError(f"max_waiting {sampling.max_waiting} is less than one training step takes")
        self.reader, self.sampling, self.staleness = reader, sampling, staleness
        self.counts: Counter[str] = Counter()
        self._pool = GroupPool(sampling.group_size, self.counts)
        self._ages: list[int] = []
        self._unproven = 0

    def limit(self, limits: Limits) -> None:
        self.reader.limits = limits

    def sample(self, step: int, *, generation: int) -> Batch | None:
        now = (generation, step)
        groups = self.pop_groups(self.sampling.groups, now)
        return None if groups is None else self.batch(groups, now)

    def preparing(self) -> AbstractContextManager[None]:
        return self.reader.reading_ahead(self.sampling.groups * self.sampling.group_size)

    def pop_groups(self, count: int, now: Pair) -> list[RolloutGroup] | None:
        """Remove and return this many groups; None, and none are removed, if there are fewer."""
        self._read_batches(now)
        groups = self._pool.whole()[:count]
        if len(groups) < count:
            return None
        self._pool.remove(groups)
        return groups

    def batch(self, groups: Sequence[RolloutGroup], now: Pair) -> Batch:
        staleness = self.staleness
        experiences = tuple(experience for group in groups for experience in group.experiences)
        origins: tuple[Origin, ...] = tuple(origin for group in groups for origin in group.origins)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        oldest = [staleness.oldest(rollout, now) for rollout in rollouts]
        ages = tuple(age for age, rollout in zip(oldest, rollouts, strict=True) for _ in rollout)
        numbers = tuple(number for number, group in enumerate(groups) for _ in group.experiences)
        self._ages = [age for age in oldest if age is not None]
        self._unproven = sum(segment.doubted for segment in experiences)
        return Batch(experiences, numbers, tuple(map(staleness.weight, ages)), ages, origins)

    def state_dict(self) -> dict[str, Any]:
        now = self.reader.clock.monotonic()
        return {
            "kind": self.KIND,
            "cursor": self.reader.cursor.document(),
            "waiting": [group_document(group, now) for group in self._pool.groups.values()],
            "counts": dict(sorted(self.counts.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = fields_of(state, self.KIND)
        self.reader.restore(cursor_from(fields.record("cursor")))
        groups = load_groups(fields.records("waiting"), self.reader.load, self.reader.clock.monotonic())
        self._pool.groups = {group.key: group for group in groups}
        counts = fields.record("counts")
        self.counts.clear()
        self.counts.update({name: counts.integer(name) for name in counts.document})

    def commit(self, state: Mapping[str, Any], keep: frozenset[BatchFile] = frozenset()) -> int:
        """Release the batches of which no group waits in the saved state, but those in `keep`."""
        fields = fields_of(state, self.KIND)
        through = cursor_from(fields.record("cursor")).through
        return self.reader.commit(through, keep.union(files_of(fields.records("waiting"))))

    def metrics(self) -> dict[str, float]:
        counts = {f"experience/{name}": float(count) for name, count in sorted(self.counts.items())}
        return {
            **counts,
            "experience/waiting": float(self._pool.waiting(whole=True)),
            "experience/waiting_incomplete": float(self._pool.waiting(whole=False)),
            "experience/waiting_batches": float(self.reader.waiting_files),
            "experience/dropped": float(sum(self.counts.values())),
            "experience/rejected": float(self.reader.counts["rejected"]),
            "experience/age_mean": sum(self._ages) / len(self._ages) if self._ages else 0.0,
            "experience/age_max": float(max(self._ages, default=0)),
            "experience/unproven_tokens": float(self._unproven),
        }

    def _read_batches(self, now: Pair) -> None:
        clock, most = self.reader.clock.monotonic, self.sampling.max_waiting
        self._drop(now)
        if self._pool.waiting(whole=True) >= most:
            return
        for loaded in self.reader.poll():
            self._pool.add(loaded, clock())
            if max(self._pool.waiting(whole=True), self._pool.waiting(whole=False)) >= most:
                self._drop(now)
                if self._pool.waiting(whole=True) >= most:
                    return
        self._drop(now)

    def _drop(self, now: Pair) -> None:
        pool, sampling, at = self._pool, self.sampling, self.reader.clock.monotonic()
        pool.drop("stale", lambda group: self.staleness.is_stale(group.experiences, now))
        pool.drop(
            "incomplete",
            lambda group: not pool.is_whole(group) and at - group.since >= sampling.group_timeout,
        )
        while pool.waiting(whole=False) > sampling.max_waiting:
            oldest = next(group for group in pool.groups.values() if not pool.is_whole(group))
            pool.drop("crowded", lambda group, oldest=oldest: group is oldest)  # type: ignore[misc]
