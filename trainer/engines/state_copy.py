"""The training state of one rank: copied into memory of the host that is kept between saves, then written to files.

A copy is written while training continues. It has the structure of the original, so files are the same as those of
`torch.save` on the engine's own objects. Each tensor of a copy has a storage of its own, as `torch.save` writes whole
storages.
"""

import copy
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch

from syncd.errors import StorageError, storage_error
from syncd.transports.files.buffers import PinnedBuffer, TensorCopies
from syncd.transports.host_memory import HostMemory

TrainingState = Mapping[str, Any]
"""What each file holds, by its name, which may begin with directories: bytes, the path of a file on this host
whose bytes are copied, and all else by torch.save."""

_BUDGET = "the copy of the training state"
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A training state that can be written once, by any thread and without the other ranks."""

    # Writes the files into a directory and returns their names; raises StorageError.
    write: Callable[[str], list[str]]
    # Why it is the engine's own state, which must not change before it is written; empty for a copy.
    live: str = ""


class StateBuffer:
    """Memory for copies of a training state, allocated by the first; none are made if `live` says why not."""

    def __init__(self, memory: HostMemory, live: str = "") -> None:
        self._memory, self._live = memory, live
        self._buffer: PinnedBuffer | None = None
        self._ahead: Future[PinnedBuffer] | None = None
        self._helper = ThreadPoolExecutor(1, "state-copy")

    def prepare(self, files: TrainingState) -> None:
        """Begin to allocate memory for states like this one in a thread; optional, and larger ones are copied too."""
        sources = list(_tensors(files))
        size = sum(map(_room, sources))
        if not (self._live or _uncopied(sources) or self._memory.take(_BUDGET, size)):
            self._ahead = self._helper.submit(PinnedBuffer, size, pinned=True)

    def capture(self, files: TrainingState) -> CapturedState:
        """Copy a state, over the one before, which must have been written; keep the original if that fails."""
        sources = list(_tensors(files))
        live = self._live or _uncopied(sources) or self._reserve(sum(map(_room, sources)))
        if live:
            return CapturedState(partial(write_files, files), live)
        copies = copy.deepcopy(dict(files), self._copied(sources))
        return CapturedState(partial(write_files, copies))

    def close(self) -> None:
        self._free()
        self._helper.shutdown()
        self._memory.take(_BUDGET, 0)

    def _free(self) -> None:
        if self._ahead is not None:
            self._buffer, self._ahead = self._ahead.result(), None
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _reserve(self, size: int) -> str:
        """Have a buffer of that size; return why there is none."""
        if self._ahead is not None:
            self._buffer, self._ahead = self._ahead.result(), None
        if self._buffer is not None and self._buffer.capacity >= size:
            return ""
        if refused := self._memory.take(_BUDGET, size):
            return refused
        self._free()
        self._buffer = PinnedBuffer(size, pinned=True)
        return ""

    def _copied(self, sources: list[torch.Tensor]) -> dict[int, Any]:
        """Return copies by the identity of the original, which is how `deepcopy` looks for them."""
        assert self._buffer is not None
        done: dict[int, Any] = {}
        shared: dict[Any, torch.Tensor] = {}
        end = 0
        with TensorCopies(self._helper) as copies:
            for source in sources:
                local = _local(source)
                key = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
                if key not in shared or not local.nbytes:
                    shared[key] = self._buffer.piece(end, local.dtype, local.shape)
                    copies.add(shared[key], local, lasts=True)
                    end += _room(source)
                done[id(source)] = _like(source, shared[key])
        return done


def write_files(files: TrainingState, directory: str) -> list[str]:
    for name, content in files.items():
        path = f"{directory}/{name}"
        try:
            for parent in reversed(PurePath(name).parents[:-1]):
                # Without the save's own directory, which another trainer may have removed.
                Path(directory, parent).mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
                continue
            with open(path, "wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    torch.save(content, file)
        except (OSError, RuntimeError) as error:
            raise _storage_error(error, path) from error
    return list(files)


def _storage_error(error: OSError | RuntimeError, path: str) -> StorageError:
    """Return what the operating system said, over which torch raises errors about its own place in the file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return StorageError(f"the training state cannot be written: {error}", path=path)
    return storage_error(cause, path)


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _uncopied(sources: list[torch.Tensor]) -> str:
    others = {type(source).__name__ for source in sources} - {"Tensor", "Parameter", "DTensor"}
    return f"it has tensors of type {', '.join(sorted(others))}" if others else ""


def _is_spread(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor: one exists only where its module was imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor if _is_spread(tensor) else tensor.detach()  # noqa: SLF001 - no collective
    return local


def _room(tensor: torch.Tensor) -> int:
    return -(-_local(tensor).nbytes // _ALIGN) * _ALIGN


def _like(source: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor spread as the source is, around a copy of this rank's part in main memory."""
    if not _is_spread(source):
        return local
    # Not `from_local`, which would bring it to the device of the mesh.
    make: Callable[..., torch.Tensor] = type(source)
    return make(local, source._spec, requires_grad=False)  # noqa: SLF001
