"""Any directory of safetensors, from any trainer, becomes a step of a job."""

import uuid

from syncd.errors import UsageError
from syncd.protocol.digest import chunks
from syncd.protocol.disk import MISSING, Disk, LocalDisk, is_temporary, list_if_there
from syncd.protocol.layout import ACTOR, MAX_STEP, Job
from syncd.protocol.manifest import Manifest
from syncd.protocol.marker import read_marker
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import read_header
from syncd.protocol.writer import StepWriter

SHARD = ".safetensors"
ADAPTER = "adapter_model.safetensors"

_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""What an engine may need beside the weights: configuration, tokenizer, chat template, index."""


def publish_directory(
    job: Job, step: int, source: str, *, rewind: bool = False, outside: Disk | None = None
) -> Manifest:
    """Copy a directory of safetensors into a job as a sealed step, and announce it.

    Every header is checked before anything is written. An interrupted call leaves no step; the same call mends it.

    Args:
        job: The job; its directory must exist.
        step: The step to become.
        source: A directory with at least one `*.safetensors` file; its subdirectories are not copied.
        rewind: Whether the step may be lower than what the marker names: explorers then go back to it.
        outside: The disk of the source; a plain one unless given.

    Raises:
        UsageError: There is nothing to publish, the step exists, or it would be a rewind that was not asked for.
        CorruptDataError: A file of the source is damaged.
    """
    outside = outside or LocalDisk()
    shards, files = _contents(outside, source)
    _check(job, step, rewind=rewind)
    counts = {name: len(read_header(outside, f"{source}/{name}").tensors) for name in shards}
    writer = StepWriter(job, step, 1, uuid.uuid4().hex)
    writer.begin()
    _clear_temporaries(job, writer)
    records = [_copy(writer, outside, source, name, counts.get(name, 0)) for name in (*shards, *files)]
    writer.receipt(1, records[: len(shards)], records[len(shards) :])
    manifest = writer.seal(kind="lora" if shards == [ADAPTER] else "weights")
    if manifest is None:  # the receipt of the only writer has just been written
        raise UsageError("another process is writing the same step", path=writer.path)
    writer.announce()
    return manifest


def _contents(disk: Disk, source: str) -> tuple[list[str], list[str]]:
    try:
        names = sorted(
            entry.name for entry in disk.list(source) if entry.kind == "file" and entry.name[0] != "."
        )
    except OSError as error:
        raise UsageError(f"cannot be listed ({error.strerror})", path=source) from error
    shards = [name for name in names if name.endswith(SHARD)]
    if not shards:
        raise UsageError("no *.safetensors file", path=source, hint=f"ls -l {source}")
    return shards, [name for name in names if name.endswith(_CARRIED)]


def _check(job: Job, step: int, *, rewind: bool) -> None:
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is out of range")
    if not _is_directory(job.disk, job.root):
        raise UsageError("the job directory is not there", path=job.root, hint=f"mkdir -p {job.root}")
    named = read_marker(job.disk, job.marker).step
    if named is not None and step < named and not rewind:
        raise UsageError(
            f"step {step} is below the newest, {named}: explorers would go back to it",
            path=job.root,
            hint="publish a higher step, or say --rewind",
        )


def _is_directory(disk: Disk, path: str) -> bool:
    try:
        return disk.stat(path).kind == "directory"
    except MISSING:
        return False


def _copy(writer: StepWriter, disk: Disk, source: str, name: str, tensors: int) -> FileRecord:
    return writer.write(f"{ACTOR}/{name}", chunks(disk, f"{source}/{name}"), tensors)


def _clear_temporaries(job: Job, writer: StepWriter) -> None:
    """Remove what an interrupted call left half written: this is the step's only writer."""
    directory = f"{writer.path}/{ACTOR}"
    for entry in list_if_there(job.disk, directory):
        if entry.kind == "file" and is_temporary(entry.name):
            job.disk.unlink(f"{directory}/{entry.name}")
