"""The rollouts that a job still has: a list of the newest, from batches that wait and from those that are kept.

Only batches whose seal holds are shown, as the trainer's reader does it (docs/experience.md); others are listed with
the reason. Needs pyarrow, which is imported at the first reading. docs/json.md documents the answers.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from syncd.errors import ConfigError, CorruptDataError, ProtocolTooNewError, storage_error, storage_errors
from syncd.experience import batch_paths
from syncd.extras import install_command
from syncd.parts.page.document import bounded, serving
from syncd.parts.page.poller import PollResult
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.documents import read_document
from syncd.protocol.layout import Job

if TYPE_CHECKING:
    from syncd.experience.model import Experience

Document = dict[str, Any]

SCHEMA = 1  # the `schema_version` of `/rollouts.json` and `/rollout.json`
EVERY = 10.0  # seconds between two readings at least
MOST_ROLLOUTS = 2000  # rollouts in the list; older batches are counted
MOST_BATCH = 64 << 20  # the largest batch that is read, in bytes
MOST_READ = 64 << 20  # bytes of batches beyond which one reading begins no other batch
ROWS = 20  # rollouts in one answer

MOST_REASONS = 50
_MOST_VERSIONS = 16
_REASON = ".reason.json"
_VERSION = re.compile(r"(?:([0-9]{1,15})\.)?([0-9]{1,15})", re.ASCII)
_BAD = (CorruptDataError, ProtocolTooNewError)

Rows = tuple["Experience", ...]


class BatchName(NamedTuple):
    """A batch of an explorer, wherever it lies."""

    explorer: str
    number: int


class ReadBatch(NamedTuple):
    experiences: Rows
    size: int
    is_archived: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    rollouts: tuple[Document, ...]
    problem: str = ""
    is_final: bool = True


def read_batch(job: Job, batch: BatchName) -> ReadBatch:
    decode = _decoder()
    path, is_archived = batch_paths.batch(job, *batch), False
    try:
        data = job.disk.read(path, MOST_BATCH)
    except MISSING:
        path = f"{batch_paths.archive(job, batch.explorer)}/{batch.number}{batch_paths.SUFFIX}"
        data, is_archived = job.disk.read(path, MOST_BATCH), True
    return ReadBatch(decode(data, path), len(data), is_archived)


def _decoder() -> Callable[[bytes, str], Rows]:
    try:
        from syncd.experience.table import decode_batch  # noqa: PLC0415 - pyarrow, an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "rollouts need pyarrow, which is not installed", hint=install_command("experience")
        ) from error
    return decode_batch


class RolloutIndex:
    """Reads a job's newest batches, each once, for the list; beyond `most_read` bytes a reading begins none."""

    def __init__(
        self, open_job: Callable[[], Job], most: int = MOST_ROLLOUTS, most_read: int = MOST_READ
    ) -> None:
        self._open, self._most, self._most_read = open_job, most, most_read
        self._job: Job | None = None
        self._batches: dict[BatchName, _Batch] = {}
        self._reasons: dict[str, Document] = {}

    def __call__(self) -> Document:
        job = self._job = self._job or self._open()
        _decoder()
        with storage_errors(job.root):
            unread = self._update(job)
            rejected = self._rejected(job)
        rows = [row for batch in self._batches.values() for row in batch.rollouts]
        rows.sort(key=lambda row: (-row["created_at"], row["explorer"], -row["batch"], row["row"]))
        return {
            "rollouts": rows,
            "batches": {"read": len(self._batches), "unread": unread},
            "unreadable": [
                {"explorer": name.explorer, "batch": name.number, "reason": batch.problem}
                for name, batch in self._batches.items()
                if batch.problem
            ][:MOST_REASONS],
            "rejected": rejected,
        }

    def _update(self, job: Job) -> int:
        """Read batches from the newest on until the list is full; return how many were left unread."""
        before, self._batches = self._batches, {}
        budget, count, unread = self._most_read, 0, 0
        for name in _newest_first(job):
            batch = before.get(name)
            batch = batch if batch is not None and batch.is_final else None
            if count >= self._most or (batch is None and budget <= 0):
                unread += 1
                continue
            if batch is None:
                batch, size = _read(job, name)
                budget -= size
            if batch is not None:
                self._batches[name] = batch
                count += len(batch.rollouts)
        return unread

    def _rejected(self, job: Job) -> list[Document]:
        before, self._reasons = self._reasons, {}
        for explorer in batch_paths.explorers(job):
            directory = batch_paths.rejected(job, explorer)
            names = sorted(
                (entry.name for entry in list_if_there(job.disk, directory) if entry.name.endswith(_REASON)),
                key=lambda name: (batch_paths.parse_batch(name.removesuffix(_REASON)) or 0, name),
            )
            for path in (f"{directory}/{name}" for name in names[-MOST_REASONS:]):
                self._reasons[path] = before.get(path) or _reason(job, explorer, path)
        newest = sorted(self._reasons.values(), key=lambda reason: reason["at"], reverse=True)
        return newest[:MOST_REASONS]


def _newest_first(job: Job) -> Iterator[BatchName]:
    """Yield all batches: the newest of each explorer, then the second newest of each, and so on."""
    numbers = {
        explorer: sorted(
            batch_paths.numbers(job, batch_paths.batches(job, explorer))
            | batch_paths.numbers(job, batch_paths.archive(job, explorer)),
            reverse=True,
        )
        for explorer in batch_paths.explorers(job)
    }
    for position in range(max(map(len, numbers.values()), default=0)):
        for explorer, descending in numbers.items():
            if position < len(descending):
                yield BatchName(explorer, descending[position])


def _read(job: Job, name: BatchName) -> tuple[_Batch | None, int]:
    """Return what the list has of a batch, None if it went away; and what reading it took of the budget."""
    try:
        batch = read_batch(job, name)
    except MISSING:
        return None, 0
    except _BAD as error:
        return _Batch((), error.message), MOST_BATCH // 16
    except OSError as error:
        return _Batch((), str(storage_error(error, None)), is_final=False), MOST_BATCH // 16
    return _Batch(tuple(_summaries(name, batch.experiences))), batch.size


def _summaries(name: BatchName, experiences: Rows) -> Iterator[Document]:
    from syncd.experience.table import rollouts  # noqa: PLC0415 - pyarrow, an extra

    row = 0
    for segments in rollouts(experiences):
        first, versions = segments[0], sorted(set().union(*(segment.versions for segment in segments)))
        yield {
            "explorer": name.explorer,
            "batch": name.number,
            "row": row,
            "task": first.task,
            "group": first.group,
            "rollout": first.rollout,
            "reward": first.reward,
            "segments": len(segments),
            "prompt_tokens": first.prompt_length,
            "response_tokens": sum(len(segment.logprobs) for segment in segments),
            "unproven_tokens": sum(sum(segment.unproven or ()) for segment in segments),
            "versions": [list(version) for version in versions[-_MOST_VERSIONS:]],
            "created_at": first.created_at,
        }
        row += len(segments)


def _reason(job: Job, explorer: str, path: str) -> Document:
    """Return why the trainer rejected a file, as far as that can be read."""
    name = path.rpartition("/")[2].removesuffix(_REASON)
    try:
        fields = read_document(job.disk, path)
        reason, at = fields.text("reason"), fields.number("at")
    except (OSError, *_BAD):
        reason, at = "the reason cannot be read", 0.0
    document: Document = bounded({"explorer": explorer, "name": name, "reason": reason, "at": at})
    return document


# --- what is asked for --------------------------------------------------------------------------------------------


def disabled() -> Document:
    return {"schema_version": SCHEMA, "enabled": False}


def answer(poll: PollResult, every: float, query: Mapping[str, str]) -> Document | None:
    """Return the answer of `/rollouts.json`, None if a filter cannot be read.

    Filters: `task`, `group`, `explorer` (a part of the name), `version`, `reward_min`, `reward_max` and `from`.
    """
    try:
        fits, start = _filter(query), int(query.get("from", "0"))
    except ValueError:
        return None
    document: Mapping[str, Any] = poll.document or {
        "rollouts": [],
        "batches": {"read": 0, "unread": 0},
        "unreadable": [],
        "rejected": [],
    }
    fitting = [row for row in document["rollouts"] if fits(row)]
    return {
        "schema_version": SCHEMA,
        "enabled": True,
        "serving": serving(poll, every),
        **document,
        "rollouts": fitting[max(start, 0) :][:ROWS],
        "rows": ROWS,
        "found": len(fitting),
        "known": len(document["rollouts"]),
    }


def _filter(query: Mapping[str, str]) -> Callable[[Document], bool]:
    least, most = float(query.get("reward_min") or -math.inf), float(query.get("reward_max") or math.inf)
    parts = {name: query.get(name, "").lower() for name in ("task", "group", "explorer")}
    generation, step = _version(query.get("version", ""))

    def fits(row: Document) -> bool:
        return (
            least <= row["reward"] <= most
            and all(part in row[name].lower() for name, part in parts.items())
            and (step is None or _has(row["versions"], generation, step))
        )

    return fits


def _has(versions: Sequence[Sequence[int]], generation: int | None, step: int) -> bool:
    return any(version[1] == step and generation in (None, version[0]) for version in versions)


def _version(text: str) -> tuple[int | None, int | None]:
    """Return generation and step of `2.40` or `40`, None for what is not asked for."""
    if not text:
        return None, None
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return (int(match[1]) if match[1] else None), int(match[2])
