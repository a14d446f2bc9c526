"""Finds the weights in a directory: one file, numbered shards, an index, an adapter, a distributed checkpoint.

The index decides where there is one: it is written last, and loaders follow it. Without one the numbers in the names
decide. What contradicts itself is reported and never guessed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from syncd.daemon.foreign.directory import Check, StepDirectory, Verdict, WeightFile, joined
from syncd.daemon.foreign.weights import StepWeights, gather, lacking
from syncd.daemon.foreign.whole_files import (
    DATA_SUFFIX,
    whole_archive,
    whole_index,
    whole_metadata,
    whole_object,
    whole_tensors,
)
from syncd.protocol.disk import Disk
from syncd.protocol.layout import ADAPTER_CONFIG
from syncd.protocol.step import StepState

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names that one library gives to the shards of a model."""

    single: str  # the file of a model that is not sharded
    index: str  # the file that names the shards
    numbered: re.Pattern[str]  # a shard's name: its number and how many there are
    check: Check  # returns whether a shard is whole


def _family(stem: str, suffix: str, check: Check) -> ShardNames:
    numbered = re.compile(rf"{stem}-([0-9]{{5}})-of-([0-9]{{5}})\.{suffix}", re.ASCII)
    return ShardNames(f"{stem}.{suffix}", f"{stem}.{suffix}.index.json", numbered, check)


SAFETENSORS = _family("model", "safetensors", whole_tensors)
PYTORCH = _family("pytorch_model", "bin", whole_archive)
_ADAPTERS: Mapping[str, Check] = {
    "adapter_model.safetensors": whole_tensors,
    "adapter_model.bin": whole_archive,
}


def find_shards(
    directory: StepDirectory, subdirectory: str, families: tuple[ShardNames, ...] = (SAFETENSORS, PYTORCH)
) -> StepWeights | None:
    for family in families:
        if (weights := _of_family(directory, subdirectory, family)) is not None:
            return weights
    return None


def find_adapter(directory: StepDirectory, subdirectory: str) -> StepWeights | None:
    """Return the adapter in a directory; it is whole once its configuration, which is written last, is there."""
    names = directory.names(subdirectory)
    name = next((name for name in _ADAPTERS if name in names), None)
    if name is None and ADAPTER_CONFIG not in names:
        return None
    files = gather(directory, subdirectory, (name,), _ADAPTERS[name]) if name else ()
    return needing(directory, StepWeights(subdirectory, files, 1, kind="lora"), ADAPTER_CONFIG)


def needing(directory: StepDirectory, weights: StepWeights, name: str) -> StepWeights:
    """Return the weights, incomplete as long as a configuration file beside them is."""
    file = directory.file(weights.subdirectory, name, whole_object)
    if file is None:
        return lacking(weights, f"{name} does not exist yet")
    return weights if file.is_whole else lacking(weights, f"{name}: {file.verdict.problem}")


def _of_family(directory: StepDirectory, subdirectory: str, family: ShardNames) -> StepWeights | None:
    names = directory.names(subdirectory)
    numbered = {name: match for name in names if (match := family.numbered.fullmatch(name))}
    if family.single in names and (numbered or family.index in names):
        files = gather(directory, subdirectory, (family.single, *numbered), family.check)
        return StepWeights(subdirectory, files, missing=f"{family.single} and shards are mixed")
    if family.index in names:
        return _indexed(directory, subdirectory, family)
    if numbered:
        return _numbered(directory, subdirectory, family, numbered)
    if family.single in names:
        return StepWeights(subdirectory, gather(directory, subdirectory, (family.single,), family.check), 1)
    return None


def _indexed(directory: StepDirectory, subdirectory: str, family: ShardNames) -> StepWeights:
    index = directory.file(subdirectory, family.index, whole_index)
    if index is None:
        return StepWeights(subdirectory, missing=f"{family.index} is not a file")
    problem = f"{family.index}: {index.verdict.problem}"
    if index.verdict.state is StepState.DAMAGED:
        return StepWeights(subdirectory, broken=problem)
    names = [*index.verdict.names] or [
        name for name in directory.names(subdirectory) if family.numbered.fullmatch(name)
    ]
    files = gather(directory, subdirectory, names, family.check)
    return (
        StepWeights(subdirectory, files, len(names))
        if index.is_whole
        else StepWeights(subdirectory, files, missing=problem)
    )


def _numbered(
    directory: StepDirectory, subdirectory: str, family: ShardNames, numbered: Mapping[str, re.Match[str]]
) -> StepWeights:
    files = gather(directory, subdirectory, numbered, family.check)
    totals = sorted({int(match[2]) for match in numbered.values()})
    if len(totals) > 1:
        return StepWeights(
            subdirectory, files, missing=f"shards of {totals[0]} and of {totals[-1]} are mixed"
        )
    for name, match in numbered.items():
        if not 1 <= int(match[1]) <= totals[0]:
            return StepWeights(subdirectory, files, broken=f"{name} counts beyond its total")
    return StepWeights(subdirectory, files, totals[0])


METADATA = ".metadata"
_COMMON = "common.pt"


def find_distributed(directory: StepDirectory, subdirectory: str) -> StepWeights | None:
    """Return the weights of a distributed checkpoint of torch, None where there is nothing of one.

    `.metadata` is renamed to its place after all data files were synced, so it decides which there must be and how
    long each is. Megatron writes `common.pt` first and `metadata.json` last beside them.
    """
    names = directory.names(subdirectory)
    data = [name for name in names if name.endswith(DATA_SUFFIX)]
    if METADATA not in names and _COMMON not in names and not data:
        return None
    metadata = directory.file(subdirectory, METADATA, whole_metadata)
    if metadata is None or metadata.verdict.state is StepState.FILLING:
        why = metadata.verdict.problem if metadata else "it does not exist yet"
        return StepWeights(
            subdirectory, gather(directory, subdirectory, data, _as_it_is), missing=f"{METADATA}: {why}"
        )
    if metadata.verdict.state is StepState.DAMAGED:
        return StepWeights(subdirectory, broken=f"{METADATA}: {metadata.verdict.problem}")
    weights = _data_files(directory, subdirectory, metadata)
    return _with_common(directory, weights) if _COMMON in names else weights


def _as_it_is(_disk: Disk, _path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Accept a data file: the metadata says how long it must be."""
    return Verdict()


def _data_files(directory: StepDirectory, subdirectory: str, metadata: WeightFile) -> StepWeights:
    lengths = {joined(subdirectory, name): length for name, length in metadata.verdict.names.items()}
    data = gather(directory, subdirectory, metadata.verdict.names, _as_it_is)
    files = (metadata, *(_measured(file, lengths) for file in data))
    return StepWeights(subdirectory, files, len(lengths), extra=frozenset({metadata.name}))


def _measured(file: WeightFile, lengths: Mapping[str, int]) -> WeightFile:
    size, wanted = file.stat.size, lengths[file.name]
    if size == wanted:
        return file
    state = StepState.FILLING if size < wanted else StepState.DAMAGED
    return file._replace(verdict=Verdict(state, f"{size} of {wanted} bytes"))


def _with_common(directory: StepDirectory, weights: StepWeights) -> StepWeights:
    """Return the weights with what Megatron writes beside them, which must be whole too."""
    common = gather(directory, weights.subdirectory, (_COMMON,), whole_archive)
    if not common:
        return lacking(weights, f"{_COMMON} is not a file")
    extra = weights.extra | {joined(weights.subdirectory, _COMMON)}
    return needing(directory, replace(weights, files=weights.files + common, extra=extra), "metadata.json")
