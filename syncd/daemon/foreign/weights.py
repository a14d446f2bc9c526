"""The weights of a step: the files that there are against the files that there must be."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from syncd.daemon.foreign.directory import Check, StepDirectory, WeightFile
from syncd.protocol.step import StepState

FILES_LIMIT = 1 << 14  # the most files of one step; a directory may hold more, which are ignored


@dataclass(frozen=True, slots=True)
class StepWeights:
    subdirectory: str  # the directory that an engine loads, relative to the step; empty for the step itself
    files: tuple[WeightFile, ...] = ()  # the files that there are, of those that count
    expected: int | None = None  # how many shards there must be, None while unknown
    kind: str = "weights"  # weights, lora or remote
    uri: str = ""  # for kind remote, what to load instead of a directory
    # Names of files among `files` that are no shards, and are not counted.
    extra: frozenset[str] = frozenset()
    missing: str = ""  # what more writing may still complete
    broken: str = ""  # what no more writing can repair

    @property
    def present(self) -> int:
        return sum(file.is_whole and file.name not in self.extra for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.stat.size for file in self.files)

    @property
    def state(self) -> StepState:
        states = {file.verdict.state for file in self.files}
        if self.broken or StepState.DAMAGED in states:
            return StepState.DAMAGED
        whole = not self.missing and states == {StepState.COMPLETE} and self.present == self.expected
        return StepState.COMPLETE if whole else StepState.FILLING

    @property
    def problem(self) -> str:
        state = self.state
        if state is StepState.COMPLETE:
            return ""
        wrong = next((file for file in self.files if file.verdict.state is state), None)
        if state is StepState.DAMAGED:
            return self.broken or (f"{wrong.name}: {wrong.verdict.problem}" if wrong else "")
        counted = f"{self.present} of {self.expected or 'an unknown number of'} files are complete"
        details = [self.missing, f"{wrong.name}: {wrong.verdict.problem}" if wrong else ""]
        return _joined(counted, *details)

    @property
    def fingerprint(self) -> str:
        """Return what changes when a weight file is written again, and not when other files join them."""
        state = hashlib.sha256()
        for name, stat in sorted((file.name, file.stat) for file in self.files):
            state.update(f"{name}\0{stat.size}\0{stat.mtime_ns}\0{stat.inode}\n".encode())
        return f"sha256:{state.hexdigest()}"


def gather(
    directory: StepDirectory, subdirectory: str, names: Iterable[str], check: Check
) -> tuple[WeightFile, ...]:
    files = (directory.file(subdirectory, name, check) for name in sorted(names)[:FILES_LIMIT])
    return tuple(file for file in files if file is not None)


def lacking(weights: StepWeights, problem: str) -> StepWeights:
    return replace(weights, missing=_joined(weights.missing, problem))


def together(weights: StepWeights, other: StepWeights | None) -> StepWeights:
    """Return weights and what must be whole beside them, as one set of files."""
    if other is None:
        return weights
    counts = [part.expected for part in (weights, other) if part.expected is not None]
    return replace(
        weights,
        files=weights.files + other.files,
        expected=sum(counts) if len(counts) == 2 else None,  # noqa: PLR2004 - both are known
        extra=weights.extra | other.extra,
        missing=_joined(weights.missing, other.missing),
        broken=weights.broken or other.broken,
    )


def _joined(*problems: str) -> str:
    return "; ".join(filter(None, problems))
