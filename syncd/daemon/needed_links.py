"""Which steps must stay although a plan removes them: something that stays is stored as changes of them.

A plan knows the steps of one scan. Until its removals are done, a person may pin one of these steps, and a trainer
may seal a delta of another one. A step that stays for such a reason keeps its whole chain.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job, parse_step_name
from syncd.protocol.manifest import read_manifest
from syncd.protocol.step import Step, StepState

NEEDED = "is stored as changes of it"  # how a reason ends why a link of a chain stays


class Links:
    """The links that must stay, each with why. Removals go from the newest delta of a chain to its keyframe."""

    def __init__(self, job: Job, steps: Mapping[int, Step]) -> None:
        self._job = job
        self._known = {number for number, step in steps.items() if _is_known(step)}
        self._needed: dict[int, str] = {}

    def why(self, step: int) -> str:
        return self._needed.get(step, "")

    def keep(self, step: Step) -> None:
        """Take note that a step stays, and what it is stored as changes of."""
        if step.parent is not None:
            self._needed.setdefault(step.parent, f"step {step.step} stays, and {NEEDED}")

    def read_new(self, removed: Iterable[Step]) -> None:
        """Take note of the deltas that were sealed since the scan; if one cannot be read, all of `removed` stay."""
        for number in _step_numbers(self._job) - self._known:
            try:
                parent = read_manifest(self._job.disk, self._job.step(number)).parent
            except MISSING:
                continue
            except (OSError, CorruptDataError):
                for step in removed:
                    self._needed.setdefault(step.step, f"step {number} cannot be read, and perhaps {NEEDED}")
                continue
            if parent is not None:
                self._needed.setdefault(parent, f"step {number} is new, and {NEEDED}")


def links_in_trash(job: Job, parents: Mapping[int, int | None], trash: Mapping[str, int]) -> list[str]:
    """Return the entries of the trash that the steps of a job are stored as changes of, and what these need.

    A leader that died between a removal and its last look leaves such entries.

    Args:
        parents: Each step of the job, and what it is stored as changes of.
        trash: The entries of the trash by path, and the step of each.
    """
    lost = [number for number, parent in parents.items() if parent is not None and parent not in parents]
    paths, wanted = list[str](), [_parent_of(job, job.step(number)) for number in lost]
    while wanted:
        parent = wanted.pop()
        for path, number in trash.items() if parent else ():
            if path not in paths and parent and parent.is_at(job, number, path):
                paths.append(path)
                wanted.append(_parent_of(job, path))
    return paths


def parents_of(job: Job) -> dict[int, int | None]:
    """Return each step of a job, and what it is stored as changes of; a step that cannot be read has no parent."""
    parents = {number: _parent_of(job, job.step(number)) for number in _step_numbers(job)}
    return {number: parent.step if parent else None for number, parent in parents.items()}


class _Parent(NamedTuple):
    """What a step is stored as changes of: a step, and the digest of its manifest, empty for an adapter's base."""

    step: int
    digest: str

    def is_at(self, job: Job, number: int, path: str) -> bool:
        if number != self.step:
            return False
        try:
            return self.digest in ("", read_manifest(job.disk, path).digest)
        except (*MISSING, CorruptDataError):
            return False


def _parent_of(job: Job, path: str) -> _Parent | None:
    try:
        manifest = read_manifest(job.disk, path)
    except (*MISSING, CorruptDataError):
        return None
    if manifest.parent is None:
        return None
    return _Parent(manifest.parent, manifest.delta.parent_digest if manifest.delta else "")


def _is_known(step: Step) -> bool:
    # A damaged step was considered by the plan: it may be stored as changes of any step below it.
    return step.state is not StepState.FILLING and not step.is_attempt


def _step_numbers(job: Job) -> set[int]:
    numbers = (parse_step_name(entry.name) for entry in job.disk.list(job.root) if entry.kind == "directory")
    return {number for number in numbers if number is not None}
