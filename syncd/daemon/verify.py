"""What is checked of a step before it is published, beyond names and sizes."""

from collections.abc import Callable, Iterator
from enum import StrEnum

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest, damaged_files, read_manifest
from syncd.protocol.safetensors import Header, read_header, signature
from syncd.protocol.step import Step


class Verify(StrEnum):
    """How closely a step is looked at.

    size: every file is there with its size. header: every safetensors header parses and accounts for every byte of
    its file, and no tensor is in two shards. content: every byte is read and matches its digest.
    """

    SIZE = "size"
    HEADER = "header"
    CONTENT = "content"


def problems_of(
    job: Job, step: Step, level: Verify, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return what is wrong with a complete step, nothing when it is good.

    Foreign steps were checked by their layout.

    Args:
        job: The job.
        step: The step.
        level: How closely to look.
        progress: Called again and again while this takes its time.
    """
    if level is Verify.SIZE or not step.is_native or step.kind == "remote":
        return []
    path = job.step(step.step)
    try:
        manifest = read_manifest(job.disk, path)
        wrong = _headers(job, path, manifest, progress)
        return wrong or (damaged_files(job.disk, path, manifest, progress) if level is Verify.CONTENT else [])
    except (*MISSING, CorruptDataError) as error:
        return [str(error)]


def _headers(job: Job, path: str, manifest: Manifest, progress: Callable[[], None]) -> list[str]:
    wrong: list[str] = []
    try:
        signature(_sound_headers(job, path, manifest, progress, wrong))
    except CorruptDataError as error:
        wrong.append(error.message)
    return wrong


def _sound_headers(
    job: Job, path: str, manifest: Manifest, progress: Callable[[], None], wrong: list[str]
) -> Iterator[Header]:
    """Yield the headers that describe their files, and append what is wrong with the others."""
    for record in manifest.shards:
        progress()
        try:
            header = read_header(job.disk, f"{path}/{record.name}", progress)
        except (*MISSING, CorruptDataError) as error:
            wrong.append(f"{record.name}: {error}")
            continue
        if record.tensors and len(header.tensors) != record.tensors:
            wrong.append(f"{record.name}: {len(header.tensors)} tensors of {record.tensors}")
            continue
        yield header
