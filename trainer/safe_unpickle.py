"""Training states hold data alone: nothing that one of their files pickles is run, whichever library reads the file.

`torch.load` takes `weights_only`, with which it opens tensors, plain values and what `SAFE` adds. torch opens the
metadata of distributed checkpoints with `pickle.load`: they may name the classes of `METADATA` alone.
"""

import contextlib
import functools
import os
import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from syncd.errors import CorruptDataError

_RECONSTRUCT = np.zeros(0).__reduce__()[0]
SAFE: list[Any] = [
    np.ndarray, np.dtype, type(np.dtype("uint32")),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"), (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
]  # fmt: skip
"""What the state of numpy's generator is pickled with, by numpy 1 and 2."""

_CHECKPOINT = "torch.distributed.checkpoint"
METADATA = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    "torch": {"Size", "float16", "bfloat16", "float32", "float64", "uint8", "int16", "int32", "int64", "bool"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
}  # fmt: skip
"""What the pickle `.metadata` of a distributed checkpoint may name: classes that hold data alone."""

RUNS_CODE = "the file holds objects that only load by running code from it"

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_EVENT = "pickle.find_class"
_NAME = re.compile(r"GLOBAL (\S+)")
_GUARDS: list[object] = []
"""Open guards of this process, of any thread: libraries read with threads of their own."""


def load_plain(path: str, *, mapped: bool = True) -> Any:
    """Return what a file of `torch.save` holds, on the CPU; with `mapped`, its tensors are mapped, not read."""
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(error, path) from error
    except (RuntimeError, EOFError) as error:
        raise CorruptDataError(f"not a complete file of torch.save: {error}", path=path) from error


@contextlib.contextmanager
def only_plain_data(directory: str) -> Iterator[None]:
    """Have every load of this process refuse objects that would run code, while the block lasts.

    `torch.load` counts as called with `weights_only`, whatever its caller says. Other pickles may name what
    `METADATA` has, except those that ranks send each other: they were made of objects that a rank had.
    """
    _install_hook()
    guard = object()
    _GUARDS.append(guard)
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(SAFE):
            yield
    except _refusals() as error:
        raise _refused(error, directory) from error
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        _GUARDS.remove(guard)


def _refusals() -> tuple[type[BaseException], ...]:
    """Return what loads raise, also that of distributed checkpoints if their reader was imported, which is slow."""
    reader = sys.modules.get(f"{_CHECKPOINT}.api")
    return (pickle.UnpicklingError, *([] if reader is None else [reader.CheckpointException]))


def _refused(error: BaseException, path: str) -> CorruptDataError:
    """Return the error for what would run code; of torch's pages of text the name alone."""
    if named := _NAME.search(f"{error} {error.__cause__}"):
        return CorruptDataError(f"{RUNS_CODE}: {named[1]}", path=path, hint=f"ls -lR {path}")
    return CorruptDataError(
        "the training state cannot be read: it is incomplete, or no plain data", path=path
    )


@functools.cache
def _install_hook() -> None:
    """Have Python ask before a pickle of any library gets what it names. A hook stays until the process ends."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event != _EVENT or not _GUARDS:
        return
    module, name = arguments
    if name not in METADATA.get(module, ()) and not _is_between_ranks():
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _is_between_ranks() -> bool:
    """Return whether a collective call of torch's opens what another rank has sent."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - a build of torch may have no distributed part

    code = distributed_c10d._tensor_to_object.__code__  # noqa: SLF001 - no public function is on every such path
    frame = sys._getframe()  # noqa: SLF001 - there is no other way to the callers
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False
