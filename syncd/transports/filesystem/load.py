"""A version into tensors that exist: what it offers, whether that fits, and the load itself."""

import os
from collections.abc import Iterator, Mapping

from syncd.errors import CorruptDataError, LoadFailedError, RefusedError, storage_error
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import read_header, signature
from syncd.transports.base import WeightDirectory
from syncd.transports.filesystem.read import Job, Loaded, read_all
from syncd.transports.filesystem.read_file import Source
from syncd.transports.filesystem.read_targets import Held
from syncd.transports.tensors import Fit, TensorMeta, fit, require

_SUFFIX = ".safetensors"


def check(target: WeightDirectory, held: Held, *, cast: bool = True) -> Fit:
    """Look at a version without reading its weights.

    Args:
        target: The version.
        held: The tensors that it would fill.
        cast: Whether floating-point tensors may have another floating-point dtype.

    Raises:
        RefusedError: It does not fit, or is not what its records say.
    """
    try:
        found = fit(held.metas, held.aliases, offered(target), cast=cast)
    except (CorruptDataError, OSError) as error:
        raise RefusedError(f"version {target.label} cannot be read: {error}", path=target.path) from error
    require(found, f"version {target.label} does not fit the model", path=target.path)
    return found


def load(target: WeightDirectory, held: Held, found: Fit, *, direct: bool = True) -> Loaded:
    """Fill the tensors with a version's.

    Bytes that nobody has verified are hashed on their way, so what is wrong is known only when it is in the tensors
    already: they are then to be filled from the last good version.

    Args:
        target: The version.
        held: The tensors.
        found: What `check` returned for them.
        direct: Whether to read past the page cache what is not in it.

    Raises:
        LoadFailedError: The tensors may be filled in part, or with what is not the version.
    """
    try:
        sources = tuple(sources_of(target))
        job = Job(sources, held, offered(target), found.unused, verify=not target.verified, direct=direct)
        return read_all(job)
    except (CorruptDataError, OSError, RuntimeError) as error:
        said = storage_error(error, target.path) if isinstance(error, OSError) else error
        raise LoadFailedError(f"loading {target.label} failed: {said}") from error


def offered(target: WeightDirectory) -> Mapping[str, TensorMeta]:
    """Return what each tensor of a version is, by name, from its headers where the target does not say."""
    if target.tensors:
        return target.tensors
    headers = (read_header(LocalDisk(), source.path) for source in sources_of(target))
    return {name: TensorMeta(*meta) for name, meta in signature(headers).items()}


def sources_of(target: WeightDirectory) -> Iterator[Source]:
    """Yield the files of a version: those of its records, else every safetensors file of its directory."""
    for record in target.shards:
        yield Source(f"{target.path}/{record.name}", record)
    if not target.shards:
        for name in sorted(os.listdir(target.path)):
            if name.endswith(_SUFFIX) and not name.startswith("."):
                yield Source(f"{target.path}/{name}", None)
