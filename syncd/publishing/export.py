"""What of a directory becomes a step, and whether it is whole: every shard and tensor that it promises is there."""

import errno
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.disk import DOCUMENT_LIMIT, DirectoryEntry, Disk, FileStat
from syncd.protocol.documents import parse_json
from syncd.protocol.layout import ADAPTER, ADAPTER_CONFIG
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import Header, signature

SHARD = ".safetensors"
INDEX = ".safetensors.index.json"

INDEX_LIMIT = 64 << 20
"""The largest index that is read, in bytes; a model with a million tensors has one of 100 bytes a tensor."""

_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""What an engine may need beside the weights: configuration, tokenizer, chat template, index."""

_NUMBERED = re.compile(r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors", re.ASCII | re.DOTALL)
_NAMED = 3
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FollowingDisk(LocalDisk):
    """A file system on which links are followed, to read what a person has named wherever it is."""

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        return super().read(os.path.realpath(path, strict=True), limit)

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        return super().read_at(os.path.realpath(path, strict=True), offset, length, ahead=ahead)

    def stat(self, path: str) -> FileStat:
        return super().stat(os.path.realpath(path, strict=True))

    def list(self, path: str) -> list[DirectoryEntry]:
        return super().list(os.path.realpath(path, strict=True))


@dataclass(frozen=True, slots=True)
class Export:
    """A directory of safetensors that is whole."""

    directory: str
    shards: Mapping[str, Header]  # the headers of its shards, by name
    files: tuple[str, ...]  # the names of the files that go with them
    skipped: tuple[str, ...]  # the names of what is not copied; those of directories end in a slash
    stats: Mapping[str, FileStat]  # what each shard and file was when it was examined, by name

    @property
    def kind(self) -> str:
        return "lora" if ADAPTER in self.shards else "weights"


def read_export(disk: Disk, directory: str) -> Export:
    """Examine a directory: every header, every index, and whether each file can be read; `disk` may follow links."""
    entries = _entries(disk, directory)
    names = sorted(name for name in entries if _is_carried(name))
    if not any(name.endswith(SHARD) for name in names):
        raise UsageError(f"no *{SHARD} file", path=directory, hint=_list_hint(directory))
    stats = {name: _examined(disk, f"{directory}/{name}") for name in names}
    shards = {
        name: read_weights_header(disk, f"{directory}/{name}") for name in names if name.endswith(SHARD)
    }
    weight_maps = {name: _weight_map(disk, f"{directory}/{name}") for name in names if name.endswith(INDEX)}
    _require_whole(directory, shards, names, weight_maps)
    skipped = sorted(_shown(entry) for name, entry in entries.items() if name not in stats)
    files = tuple(name for name in names if name not in shards)
    return Export(directory, shards, files, tuple(skipped), stats)


def missing_numbers(names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the numbers in the names of shards, `NAME-00001-of-00002.safetensors` and so on.

    Numbers begin at 1, or at 0 as some trainers have it.
    """
    totals: dict[str, dict[int, dict[int, str]]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            stem, number, total = match[1], int(match[2]), int(match[3])
            totals.setdefault(stem, {}).setdefault(total, {})[number] = name
    for stem, groups in totals.items():
        if len(groups) > 1:
            counts = " and of ".join(str(total) for total in sorted(groups))
            yield f"shards of {counts} are mixed under the name {stem}"
        for total, numbered in groups.items():
            yield from _missing(stem, total, numbered)


def index_problems(
    index: str, weight_map: Mapping[str, str], shards: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield where an index is not what the shards hold.

    `weight_map` has the shard of each tensor, `shards` the names of the tensors of each shard.
    """
    for shard in sorted(set(weight_map.values()) - shards.keys()):
        yield f"{index} names {shard!a}, which does not exist"
    places = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    for tensor, shard in weight_map.items():
        if shard in shards and tensor not in shards[shard]:
            what = f"it is in {places[tensor]}" if tensor in places else "no shard holds it"
            yield f"{index} has tensor {tensor!a} in {shard}, and {what}"


def _require_whole(
    directory: str,
    shards: Mapping[str, Header],
    names: Collection[str],
    weight_maps: Mapping[str, Mapping[str, str]],
) -> None:
    tensors = {name: header.tensors.keys() for name, header in shards.items()}
    problems = [*_adapter_problems(names), *missing_numbers(shards), *_indexes_problems(weight_maps, tensors)]
    problems += _tensor_problems(shards.values())
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        said = "; ".join(problems[:_NAMED])
        raise CorruptDataError(
            f"the export is incomplete: {said}{more}", path=directory, hint=_list_hint(directory)
        )


def _indexes_problems(
    weight_maps: Mapping[str, Mapping[str, str]], tensors: Mapping[str, Collection[str]]
) -> Iterator[str]:
    for index, weight_map in weight_maps.items():
        yield from index_problems(index, weight_map, tensors)
    named = {shard for weight_map in weight_maps.values() for shard in weight_map.values()}
    for name in tensors:
        if weight_maps and name not in named:
            yield f"no index names {name}, so engines skip it"


def _tensor_problems(headers: Collection[Header]) -> Iterator[str]:
    if not any(header.tensors for header in headers):
        yield "its shards hold no tensor"
    try:
        signature(headers)
    except CorruptDataError as error:
        yield error.message


def _adapter_problems(names: Collection[str]) -> Iterator[str]:
    if ADAPTER not in names:
        return
    if ADAPTER_CONFIG not in names:
        yield f"{ADAPTER} exists without {ADAPTER_CONFIG}"
    if sum(name.endswith(SHARD) for name in names) > 1:
        yield f"{ADAPTER} is in one directory with the weights of a model"


def _missing(stem: str, total: int, names: Mapping[int, str]) -> Iterator[str]:
    first = 0 if 0 in names else 1
    beyond = [name for number, name in names.items() if number >= first + total]
    if beyond:
        yield f"{min(beyond)} counts beyond its total"
    elif len(names) < total:
        number = next(number for number in range(first, first + total) if number not in names)
        yield f"shard {number} of {total} of {stem} is missing, {len(names)} are there"


def _entries(disk: Disk, directory: str) -> dict[str, DirectoryEntry]:
    try:
        return {entry.name: entry for entry in disk.list(directory)}
    except OSError as error:
        raise UsageError(f"cannot be listed ({error.strerror})", path=directory) from error


def _is_carried(name: str) -> bool:
    return not name.startswith(".") and name.endswith((SHARD, *_CARRIED))


def _examined(disk: Disk, path: str) -> FileStat:
    """Return what a file is, be it behind a link, once a byte of it could be read."""
    try:
        status = disk.stat(path)
        if status.kind == "file":
            disk.read_at(path, 0, 1)
            return status
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise
        raise CorruptDataError("a broken link", path=path, hint=f"ls -l {shlex.quote(path)}") from None
    what = "a directory" if status.kind == "directory" else "a device, a pipe or a socket"
    raise CorruptDataError(f"{what} where a regular file must be", path=path, hint=_list_hint(path))


def _weight_map(disk: Disk, path: str) -> dict[str, str]:
    try:
        document = parse_json(disk.read(path, INDEX_LIMIT))
    except ValueError:
        document = None
    mapping = document.get("weight_map") if isinstance(document, dict) else None
    if isinstance(mapping, dict) and mapping and all(isinstance(shard, str) for shard in mapping.values()):
        weight_map: dict[str, str] = mapping
        return weight_map
    raise CorruptDataError("not an index of shards", path=path, hint=f"head -c 200 {shlex.quote(path)}")


def _shown(entry: DirectoryEntry) -> str:
    return f"{entry.name}/" if entry.kind == "directory" else entry.name


def _list_hint(path: str) -> str:
    return f"ls -lL {shlex.quote(path)}"
