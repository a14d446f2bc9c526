"""Checks that a version fits the tensors that it would fill: names, shapes, dtypes, ties. Imports no torch.

If a version lacks a tensor, an engine would still serve the one of the version before; if it has one that the engine
does not know, the engine may crash. So a version must have each tensor, and no other.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from syncd.errors import CorruptDataError, RefusedError
from syncd.protocol.delta import read_weights_header
from syncd.protocol.disk import MISSING, Disk, list_if_there
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header, signature
from syncd.protocol.version import Version

SUFFIX = ".safetensors"
FOREIGN = "foreign"  # the kind of what others wrote in another form than safetensors

_EMPTY = "the step has no tensors where an engine loads them"


class TensorMeta(NamedTuple):
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorMeta]

Allows = Callable[[str, TensorMeta], bool]
"""Returns whether a tensor, given its name, dtype and shape, makes no difference."""

_NAMED = 3  # how many differences a refusal names
_LONGEST = 80  # characters of a tensor's name that are printed at most


class Fit(NamedTuple):
    wrong: tuple[str, ...]  # each difference, as a text; none if the version fits
    unused: frozenset[str]  # names of the version that repeat another tensor of it under a tied name


def _never(name: str, meta: TensorMeta) -> bool:
    del name, meta
    return False


def tensors_of(headers: Iterable[Header], *, repeated: bool = False) -> Tensors:
    """Return dtype and shape of each tensor by name; if `repeated`, two files may have it, and the last counts."""
    if not repeated:
        return {name: TensorMeta(*meta) for name, meta in signature(headers).items()}
    every = (tensor for header in headers for tensor in header.tensors.values())
    return {tensor.name: TensorMeta(tensor.dtype, tensor.shape) for tensor in every}


def require_tensors(shards: Sequence[FileRecord], path: str) -> None:
    """Return if a step has shards; an engine that loads nothing would keep the old weights under a new label."""
    if not shards:
        raise RefusedError(_EMPTY, path=path)


def read_tensors(disk: Disk, directory: str, shards: Iterable[FileRecord]) -> Tensors:
    """Return dtype and shape of each tensor of a step, from the headers of its shards below `directory`."""
    headers = []
    for record in shards:
        header = _read_header(disk, f"{directory}/{record.name}")
        if record.tensors and len(header.tensors) != record.tensors:
            counts = f"{len(header.tensors)} tensors of {record.tensors}"
            raise RefusedError(f"a shard holds {counts}", path=f"{directory}/{record.name}")
        headers.append(header)
    try:
        tensors = tensors_of(headers)
    except CorruptDataError as error:
        raise RefusedError(error.message, path=directory) from None
    if not tensors:
        raise RefusedError(_EMPTY, path=directory)
    return tensors


def list_tensors(disk: Disk, version: Version, directory: str, kinds: Collection[str]) -> Tensors:
    """Return dtype and shape of each tensor of a step without a manifest; none if it is not safetensors."""
    # The step's layout was found complete. A tensor may be in one file and again in shards: engines choose.
    names = [entry.name for entry in list_if_there(disk, directory) if entry.kind == "file"]
    shards = sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith("."))
    if not shards and FOREIGN not in kinds:
        what = f"step {version.step} of layout {version.layout} holds no safetensors"
        raise RefusedError(f"{what}, and this hook loads nothing else", path=directory)
    tensors = tensors_of((_read_header(disk, f"{directory}/{name}") for name in shards), repeated=True)
    if shards and not tensors:
        raise RefusedError(f"the safetensors of step {version.step} hold no tensors", path=directory)
    return tensors


def _read_header(disk: Disk, path: str) -> Header:
    try:
        return read_weights_header(disk, path)
    except MISSING:
        raise RefusedError("a shard is missing", path=path) from None
    except CorruptDataError as error:
        raise RefusedError(error.message, path=error.path or path) from None


def compare(
    held: Tensors,
    aliases: Mapping[str, str],
    offered: Tensors,
    *,
    cast: bool,
    may_lack: Allows = _never,
    may_add: Allows = _never,
) -> Fit:
    """Compare the tensors of a version with those that it would fill; `cast` allows another floating-point dtype."""
    loaded: dict[str, str] = {}  # by each tensor, the name in the version: its own, else the first other one
    for name in (*held, *aliases):
        if name in offered:
            loaded.setdefault(aliases.get(name, name), name)
    wrong = [
        f"tensor {_shown(name)} is missing"
        for name, meta in held.items()
        if name not in loaded and not may_lack(name, meta)
    ]
    for name, meta in offered.items():
        target = held.get(aliases.get(name, name))
        if target is None:
            wrong += [] if may_add(name, meta) else [f"tensor {_shown(name)} is not expected"]
        elif not _accepts(target, meta, cast=cast):
            wrong.append(f"tensor {_shown(name)} is {_described(meta)} instead of {_described(target)}")
    unused = (name for name, first in aliases.items() if name in offered and loaded[first] != name)
    return Fit(tuple(wrong), frozenset(unused))


def in_both(held: Tensors, offered: Tensors) -> tuple[Tensors, Tensors]:
    names = held.keys() & offered.keys()
    return {name: held[name] for name in names}, {name: offered[name] for name in names}


def require_fit(fit: Fit, what: str, *, path: str | None = None, hint: str | None = None) -> None:
    """Return if a version fits; `what` begins the refusal, as in "it does not fit the engine"."""
    if fit.wrong:
        raise RefusedError(f"{what}: {first_of(fit.wrong)}", path=path, hint=hint)


def first_of(wrong: Collection[str]) -> str:
    """Return the first few of several problems as one text that says how many more there are."""
    more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return "; ".join(list(wrong)[:_NAMED]) + more


def is_float(dtype: str) -> bool:
    """Return whether a dtype of safetensors is a floating-point one that torch casts."""
    return dtype in {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}


def _accepts(target: TensorMeta, meta: TensorMeta, *, cast: bool) -> bool:
    if target.shape != meta.shape:
        return False
    return target.dtype == meta.dtype or (cast and is_float(target.dtype) and is_float(meta.dtype))


def _shown(name: str) -> str:
    return ascii(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")


def _described(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}"
