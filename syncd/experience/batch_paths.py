"""The paths of experiences: only this module knows what their files are called.

JOB/experiences/<explorer>/<seq>.parquet are batches; directories that begin with a dot are the protocol's own:
`.writers` (half-written batches, one directory a writer process), `.consumed` (how far the trainer has removed an
explorer's batches), `.rest` (how many of an explorer's batches have the rest of one that was too large), `.archive`
(consumed batches that are kept) and `.rejected` (files set aside, with a reason).
"""

import re

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.documents import read_document, write_document
from syncd.protocol.layout import Job, is_identity

SUFFIX = ".parquet"

_BATCH = re.compile(r"([1-9][0-9]{0,14})\.parquet", re.ASCII)


def root(job: Job) -> str:
    return f"{job.root}/experiences"


def batches(job: Job, explorer: str) -> str:
    return f"{root(job)}/{explorer}"


def batch(job: Job, explorer: str, seq: int) -> str:
    return f"{batches(job, explorer)}/{seq}{SUFFIX}"


def parse_batch(name: str) -> int | None:
    match = _BATCH.fullmatch(name)
    return int(match[1]) if match else None


def writers(job: Job, explorer: str) -> str:
    return f"{root(job)}/.writers/{explorer}"


def rejected(job: Job, explorer: str) -> str:
    return f"{root(job)}/.rejected/{explorer}"


def archive(job: Job, explorer: str) -> str:
    return f"{root(job)}/.archive/{explorer}"


def explorers(job: Job) -> list[str]:
    entries = list_if_there(job.disk, root(job))
    return sorted(entry.name for entry in entries if entry.kind == "directory" and is_identity(entry.name))


def numbers(job: Job, directory: str) -> set[int]:
    """Return the numbers of all batches named in a directory, of whatever kind they are."""
    parsed = (parse_batch(entry.name) for entry in list_if_there(job.disk, directory))
    return {seq for seq in parsed if seq is not None}


def consumed_through(job: Job, explorer: str) -> int:
    """Return the number up to which the trainer has removed batches; a damaged file says nothing."""
    return _integer(job, _consumed(job, explorer), "through")


def mark_consumed(job: Job, explorer: str, through: int) -> None:
    """Record how far batches are removed, before the first of them is removed, so that no number is used again."""
    write_document(job.disk, _consumed(job, explorer), {"through": through})


def rest(job: Job, explorer: str) -> str:
    return f"{root(job)}/.rest/{explorer}.json"


def rest_files(job: Job, explorer: str) -> int:
    """Return how many of an explorer's batches have the rest of one that was too large for a file."""
    return _integer(job, rest(job, explorer), "files")


def _consumed(job: Job, explorer: str) -> str:
    return f"{root(job)}/.consumed/{explorer}.json"


def _integer(job: Job, path: str, name: str) -> int:
    try:
        return read_document(job.disk, path).integer(name)
    except (*MISSING, CorruptDataError):
        return 0
