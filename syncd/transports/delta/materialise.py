"""Writes a step as the directory that a full save would have been, and proves chains without writing anything."""

import contextlib
import os
from collections.abc import Iterable, Iterator

from syncd.errors import CorruptDataError, UsageError, storage_errors
from syncd.protocol.disk import Disk, is_below, is_directory, list_if_there, remove_tree, temporary_name
from syncd.protocol.layout import ACTOR, Job
from syncd.protocol.lineage import read_chain
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest, damaged_records
from syncd.protocol.receipt import FileRecord
from syncd.transports.delta.chain import Chain, explain_removal


def materialise(job: Job, step: int, target: str, disk: Disk | None = None) -> Manifest:
    """Write the files of a step of kind weights or delta into a new directory, byte for byte as a full save has them.

    They are written beside `target` (not there yet, or empty, and outside of the job) under a hidden temporary name,
    compared with the digests of the step, synced, and renamed. An error leaves nothing; a kill leaves at most that
    temporary directory.
    """
    directory, disk = os.path.realpath(target), disk or LocalDisk()
    parent, name = os.path.split(directory)
    with storage_errors(directory), explain_removal(job, step):
        _check_target(job, disk, directory)
        chain = Chain(job, read_chain(job, step))
        temporary = f"{parent}/{temporary_name(name)}"
        try:
            _write_files(chain, disk, temporary)
            disk.rename(temporary, directory)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(disk, temporary)
            raise
        disk.sync_directory(parent)
    return chain.manifest


def write_whole(job: Job, step: int, directory: str) -> None:
    with explain_removal(job, step):
        _write_files(Chain(job, read_chain(job, step)), job.disk, directory)


def prove(job: Job, step: int, *, shortcut: bool = False) -> list[str]:
    """Return what is wrong with the chain of a step, nothing when each byte that it makes is that of the step.

    Every link's own files are compared with their digests, every frame is applied, and the result is compared with
    the digests of the files that a full save would have written. With `shortcut`, prove what that makes.
    """
    try:
        with explain_removal(job, step):
            chain = Chain(job, read_chain(job, step, shortcut=shortcut))
            wrong = [
                f"{os.path.basename(job.step(link.step))}/{problem}"
                for link in chain.deltas
                for problem in damaged_records(job.disk, job.step(link.step), _stored(link))
            ]
            for _, pieces in _files(chain):
                for _piece in pieces:
                    pass
    except CorruptDataError as error:
        return [str(error)]
    return wrong


def _stored(link: Manifest) -> tuple[FileRecord, ...]:
    """Return the records of the files that a link of a chain stores for it: of a whole step, its containers."""
    return (*link.containers, *(link.files if link.delta else ()))


def _check_target(job: Job, disk: Disk, directory: str) -> None:
    if is_below(directory, job.root):
        raise UsageError(
            "the target is inside the job", path=directory, hint="name a directory outside of it"
        )
    parent, name = os.path.split(directory)
    if not is_directory(disk, parent):
        raise UsageError("the directory of the target does not exist", path=parent, hint=f"mkdir -p {parent}")
    is_there = any(entry.name == name for entry in disk.list(parent))
    if is_there and (not is_directory(disk, directory) or list_if_there(disk, directory)):
        raise UsageError("the target exists and is not empty", path=directory, hint=f"ls -la {directory}")


def _files(chain: Chain) -> Iterator[tuple[FileRecord, Iterable[bytes | memoryview]]]:
    """Yield each file that engines load, with its content, which is compared with its digest as it is read."""
    for record in chain.manifest.whole_shards:
        yield record, (data for _, data in chain.tiles(record))
    for record in chain.manifest.whole_files:
        if record.name.startswith(f"{ACTOR}/"):
            yield record, chain.file_pieces(record)


def _write_files(chain: Chain, disk: Disk, directory: str) -> None:
    disk.make_directory(directory)
    for record, pieces in _files(chain):
        path = f"{directory}/{record.name.removeprefix(f'{ACTOR}/')}"
        disk.make_directory(os.path.dirname(path))
        disk.replace(path, map(memoryview, pieces))
