"""What a version is, read through the protocol, and whether it fits what an engine runs.

All of it comes before the engine is touched: engines that meet a wrong shape or a short file are left half
loaded, or die.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from syncd.errors import CorruptDataError, RefusedError
from syncd.protocol.disk import MISSING, Disk, list_if_there
from syncd.protocol.manifest import Manifest, missing_files, uri_problem
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header, read_header, signature
from syncd.protocol.version import Version
from syncd.transports.tensors import TensorMeta, Tensors, compare, first_of, require_fit

NATIVE = "syncd"
FOREIGN = "foreign"
"""The kind of what others wrote in another form than safetensors."""

_SUFFIX = ".safetensors"
_EMPTY = "the step has no tensors where an engine loads them"


class Verify(StrEnum):
    """How closely a version is looked at before it is handed over.

    size: every file is there with its size. header: every safetensors header parses and accounts for every byte
    of its file. content: every byte is read and matches its digest.
    """

    SIZE = "size"
    HEADER = "header"
    CONTENT = "content"


def check_kind(version: Version, kinds: Iterable[str]) -> None:
    """Check that a hook can load this kind of version.

    Raises:
        RefusedError: It cannot.
    """
    if version.kind not in kinds:
        able = ", ".join(sorted(kinds))
        raise RefusedError(f"step {version.step} is of kind {version.kind}; this hook loads {able}")


def check_uri(version: Version) -> None:
    """Check that where a remote version lies is a URI or an absolute path: programs are given it as an argument.

    Raises:
        RefusedError: It is neither.
    """
    if problem := uri_problem(version.path):
        raise RefusedError(f"step {version.step} cannot be loaded: {problem}")


def check_sizes(disk: Disk, step_path: str, manifest: Manifest) -> None:
    """Check that each file of a step is there with its size; nothing is read.

    Raises:
        RefusedError: One is not.
    """
    _refuse(missing_files(disk, step_path, manifest), step_path)


def check_payload(shards: Sequence[FileRecord], path: str) -> None:
    """Check that there is anything to load, without reading it.

    Raises:
        RefusedError: There is not; an engine that loads nothing keeps what it ran, under another name.
    """
    if not shards:
        raise RefusedError(_EMPTY, path=path)


def read_tensors(disk: Disk, directory: str, shards: Iterable[FileRecord]) -> Tensors:
    """Return what each tensor of a step is, from the headers of its shards.

    Args:
        disk: The file system.
        directory: What the names of the shards are relative to.
        shards: The shards.

    Raises:
        RefusedError: A header does not describe its file, two shards hold one tensor, or none holds any.
    """
    headers = []
    for record in shards:
        header = _header(disk, f"{directory}/{record.name}")
        if record.tensors and len(header.tensors) != record.tensors:
            found = f"{len(header.tensors)} tensors of {record.tensors}"
            raise RefusedError(f"a shard holds {found}", path=f"{directory}/{record.name}")
        headers.append(header)
    tensors = _by_name(headers, directory)
    if not tensors:
        raise RefusedError(_EMPTY, path=directory)
    return tensors


def read_foreign(disk: Disk, version: Version, directory: str, kinds: Iterable[str]) -> Tensors:
    """Return what each tensor of a step is that others wrote; none where it is not safetensors.

    Raises:
        RefusedError: A header is wrong, or this hook loads only safetensors and there are none.
    """
    # Its layout has found it whole. A tensor may be there twice, in one file and in shards: engines choose.
    names = [entry.name for entry in list_if_there(disk, directory) if entry.kind == "file"]
    shards = sorted(name for name in names if name.endswith(_SUFFIX) and not name.startswith("."))
    if not shards and FOREIGN not in kinds:
        what = f"step {version.step} of layout {version.layout} holds no safetensors"
        raise RefusedError(f"{what}, and this hook loads nothing else", path=directory)
    headers = [_header(disk, f"{directory}/{name}") for name in shards]
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    if shards and not tensors:
        raise RefusedError(f"the safetensors of step {version.step} hold no tensors", path=directory)
    return {tensor.name: TensorMeta(tensor.dtype, tensor.shape) for tensor in tensors}


def check_fit(found: Tensors, runs: Tensors) -> None:
    """Check that a version has just the tensors that an engine runs: names, shapes and dtypes.

    Raises:
        RefusedError: It does not; the message names the first differences.
    """
    require_fit(compare(runs, {}, found, cast=False), "it does not fit the engine")


def _refuse(wrong: list[str], path: str) -> None:
    if wrong:
        raise RefusedError(first_of(wrong), path=path)


def _header(disk: Disk, path: str) -> Header:
    try:
        return read_header(disk, path)
    except MISSING:
        raise RefusedError("a shard is missing", path=path) from None
    except CorruptDataError as error:
        raise RefusedError(error.message, path=error.path or path) from None


def _by_name(headers: list[Header], path: str) -> Tensors:
    try:
        found = signature(headers)
    except CorruptDataError as error:
        raise RefusedError(error.message, path=path) from None
    return {name: TensorMeta(*meta) for name, meta in found.items()}
