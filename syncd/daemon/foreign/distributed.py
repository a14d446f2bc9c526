"""Weights in torch's distributed checkpoint format: `.metadata`, and the data files that it names.

`.metadata` is renamed to its place after all data files were synced, so it decides which there must be and
how long each is. Megatron puts `common.pt` first and `metadata.json` last beside them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from syncd.daemon.foreign.archive import whole_archive
from syncd.daemon.foreign.look import File, Look, Verdict, joined
from syncd.daemon.foreign.metadata import DATA_SUFFIX, whole_metadata
from syncd.daemon.foreign.shards import needing
from syncd.daemon.foreign.weights import Weights, gather, lacking
from syncd.daemon.snapshot import State
from syncd.protocol.disk import Disk

METADATA = ".metadata"
_COMMON = "common.pt"


def find_distributed(look: Look, place: str) -> Weights | None:
    """Return the weights of a distributed checkpoint, None where there is nothing of one."""
    names = look.names(place)
    data = [name for name in names if name.endswith(DATA_SUFFIX)]
    if METADATA not in names and _COMMON not in names and not data:
        return None
    metadata = look.file(place, METADATA, whole_metadata)
    if metadata is None or metadata.verdict.state is State.FILLING:
        why = metadata.verdict.problem if metadata else "it is not there yet"
        return Weights(place, gather(look, place, data, _as_it_is), missing=f"{METADATA}: {why}")
    if metadata.verdict.state is State.DAMAGED:
        return Weights(place, broken=f"{METADATA}: {metadata.verdict.problem}")
    weights = _named(look, place, metadata)
    return _with_common(look, weights) if _COMMON in names else weights


def _as_it_is(_disk: Disk, _path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Take a data file for whole: the metadata says how long it must be."""
    return Verdict()


def _named(look: Look, place: str, metadata: File) -> Weights:
    lengths = {joined(place, name): length for name, length in metadata.verdict.names.items()}
    data = gather(look, place, metadata.verdict.names, _as_it_is)
    files = (metadata, *(_measured(file, lengths) for file in data))
    return Weights(place, files, len(lengths), extra=frozenset({metadata.name}))


def _measured(file: File, lengths: Mapping[str, int]) -> File:
    size, wanted = file.stat.size, lengths[file.name]
    if size == wanted:
        return file
    state = State.FILLING if size < wanted else State.DAMAGED
    return file._replace(verdict=Verdict(state, f"{size} of {wanted} bytes"))


def _with_common(look: Look, weights: Weights) -> Weights:
    """Return the weights with what Megatron keeps beside them, which must be whole too."""
    common = gather(look, weights.place, (_COMMON,), whole_archive)
    if not common:
        return lacking(weights, f"{_COMMON} is not a file")
    extra = weights.extra | {joined(weights.place, _COMMON)}
    return needing(look, replace(weights, files=weights.files + common, extra=extra), "metadata.json")
