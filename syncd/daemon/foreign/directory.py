"""A step directory that another framework wrote: its names, and what each of its files was found to be."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Disk, FileStat, Kind, list_if_there
from syncd.protocol.step import StepState

CACHE_LIMIT = 1 << 16  # the most verdicts and names that a cache holds, about 20 MB


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the bytes of one file are."""

    # complete: it is whole. filling: more writing may make it whole. damaged: no more writing can.
    state: StepState = StepState.COMPLETE
    problem: str = ""  # why it is not whole
    # The files that it names where it is an index of others, with their lengths, 0 where unknown.
    names: Mapping[str, int] = field(default_factory=dict)


Check = Callable[[Disk, str, int, Callable[[], None]], Verdict]
"""Returns what a file of so many bytes is. Raises `CorruptDataError` for what can never become whole."""


class WeightFile(NamedTuple):
    """One file of a step; its name is relative to the step's directory."""

    name: str
    stat: FileStat
    verdict: Verdict

    @property
    def is_whole(self) -> bool:
        return self.verdict.state is StepState.COMPLETE


_Key = tuple[Check, str, FileStat]


class VerdictCache:
    """Verdicts of files that have not changed since; the longest unused are dropped first."""

    def __init__(self, limit: int = CACHE_LIMIT) -> None:
        self._limit, self._cost = limit, 0
        self._verdicts: OrderedDict[_Key, Verdict] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verdicts)

    def get(self, key: _Key) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return verdict

    def put(self, key: _Key, verdict: Verdict) -> None:
        self._cost += _cost(verdict) - _cost(self._verdicts.pop(key, None))
        self._verdicts[key] = verdict
        while self._cost > self._limit:
            self._cost -= _cost(self._verdicts.popitem(last=False)[1])


def _cost(verdict: Verdict | None) -> int:
    return 0 if verdict is None else 1 + len(verdict.names)


class StepDirectory:
    """Reads one step directory, which a listing showed: lists each directory in it once, and follows no links."""

    def __init__(
        self, disk: Disk, cache: VerdictCache, path: str, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._disk, self._cache, self._path, self._progress = disk, cache, path, progress
        self._listed: dict[str, Mapping[str, Kind]] = {}

    def names(self, subdirectory: str = "") -> Mapping[str, Kind]:
        """Return the entries of a directory of the step, none if it is missing or reached through a link."""
        if subdirectory not in self._listed:
            here = not subdirectory or self.has_directory(subdirectory)
            entries = list_if_there(self._disk, self._absolute(subdirectory)) if here else []
            self._listed[subdirectory] = {entry.name: entry.kind for entry in entries}
        return self._listed[subdirectory]

    def has_directory(self, subdirectory: str) -> bool:
        """Return whether there is a directory, not a link, at a path relative to the step."""
        parent, _, name = subdirectory.rpartition("/")
        return self.names(parent).get(name) == "directory"

    def has_file(self, subdirectory: str, name: str) -> bool:
        return self.names(subdirectory).get(name) == "file"

    def file(self, subdirectory: str, name: str, check: Check) -> WeightFile | None:
        if not self.has_file(subdirectory, name):
            return None
        relative = joined(subdirectory, name)
        path = self._absolute(relative)
        try:
            stat = self._disk.stat(path)
            return (
                WeightFile(relative, stat, self._verdict(check, path, stat)) if stat.kind == "file" else None
            )
        except MISSING:
            return None

    def _absolute(self, subdirectory: str) -> str:
        return joined(self._path, subdirectory) if subdirectory else self._path

    def _verdict(self, check: Check, path: str, stat: FileStat) -> Verdict:
        key = check, path, stat
        if (cached := self._cache.get(key)) is not None:
            return cached
        try:
            verdict = check(self._disk, path, stat.size, self._progress)
        except CorruptDataError as error:
            verdict = Verdict(StepState.DAMAGED, error.message)
        self._cache.put(key, verdict)
        return verdict


def joined(subdirectory: str, name: str) -> str:
    return f"{subdirectory}/{name}" if subdirectory else name
