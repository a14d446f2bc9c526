"""Weights under the names of the Hugging Face libraries: one file, numbered shards, an index, an adapter.

The index decides where there is one: it is written last, and loaders follow it. Without one the numbers in
the names do. What contradicts itself is reported and never guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from syncd.daemon.foreign.archive import whole_archive
from syncd.daemon.foreign.documents import whole_index, whole_object
from syncd.daemon.foreign.look import Check, Look
from syncd.daemon.foreign.tensors import whole_tensors
from syncd.daemon.foreign.weights import Weights, gather, lacking
from syncd.daemon.snapshot import State

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Family:
    """One set of names for the shards of a model.

    Args:
        single: The file of a model that is not sharded.
        index: The file that names the shards.
        numbered: A shard's name: its number and how many there are.
        check: Says whether a shard is whole.
    """

    single: str
    index: str
    numbered: re.Pattern[str]
    check: Check


def _family(stem: str, suffix: str, check: Check) -> Family:
    numbered = re.compile(rf"{stem}-([0-9]{{5}})-of-([0-9]{{5}})\.{suffix}", re.ASCII)
    return Family(f"{stem}.{suffix}", f"{stem}.{suffix}.index.json", numbered, check)


SAFETENSORS = _family("model", "safetensors", whole_tensors)
PYTORCH = _family("pytorch_model", "bin", whole_archive)
_ADAPTERS: Mapping[str, Check] = {
    "adapter_model.safetensors": whole_tensors,
    "adapter_model.bin": whole_archive,
}


def find_shards(
    look: Look, place: str, families: tuple[Family, ...] = (SAFETENSORS, PYTORCH)
) -> Weights | None:
    """Return the weights of a model in one directory, None where nothing is named like them."""
    for family in families:
        if (found := _of_family(look, place, family)) is not None:
            return found
    return None


def find_adapter(look: Look, place: str) -> Weights | None:
    """Return the adapter in a directory, None where nothing is named like one.

    An adapter is whole with its configuration, which writers leave after the weights.
    """
    names = look.names(place)
    name = next((name for name in _ADAPTERS if name in names), None)
    if name is None and ADAPTER_CONFIG not in names:
        return None
    files = gather(look, place, (name,), _ADAPTERS[name]) if name else ()
    return needing(look, Weights(place, files, 1, kind="lora"), ADAPTER_CONFIG)


def needing(look: Look, weights: Weights, name: str) -> Weights:
    """Return the weights, incomplete as long as a configuration file beside them is."""
    found = look.file(weights.place, name, whole_object)
    if found is None:
        return lacking(weights, f"{name} is not there yet")
    return weights if found.is_whole else lacking(weights, f"{name}: {found.verdict.problem}")


def _of_family(look: Look, place: str, family: Family) -> Weights | None:
    names = look.names(place)
    numbered = {name: match for name in names if (match := family.numbered.fullmatch(name))}
    if family.single in names and (numbered or family.index in names):
        files = gather(look, place, (family.single, *numbered), family.check)
        return Weights(place, files, missing=f"{family.single} and shards are mixed")
    if family.index in names:
        return _indexed(look, place, family)
    if numbered:
        return _numbered(look, place, family, numbered)
    if family.single in names:
        return Weights(place, gather(look, place, (family.single,), family.check), 1)
    return None


def _indexed(look: Look, place: str, family: Family) -> Weights:
    index = look.file(place, family.index, whole_index)
    if index is None:
        return Weights(place, missing=f"{family.index} is not a file")
    problem = f"{family.index}: {index.verdict.problem}"
    if index.verdict.state is State.DAMAGED:
        return Weights(place, broken=problem)
    names = [*index.verdict.names] or [name for name in look.names(place) if family.numbered.fullmatch(name)]
    files = gather(look, place, names, family.check)
    return Weights(place, files, len(names)) if index.is_whole else Weights(place, files, missing=problem)


def _numbered(look: Look, place: str, family: Family, numbered: Mapping[str, re.Match[str]]) -> Weights:
    files = gather(look, place, numbered, family.check)
    totals = sorted({int(match[2]) for match in numbered.values()})
    if len(totals) > 1:
        return Weights(place, files, missing=f"shards of {totals[0]} and of {totals[-1]} are mixed")
    for name, match in numbered.items():
        if not 1 <= int(match[1]) <= totals[0]:
            return Weights(place, files, broken=f"{name} counts beyond its total")
    return Weights(place, files, totals[0])
