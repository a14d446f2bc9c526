"""Buckets of weights that the workers of an engine on this host can open.

vLLM's workers, which run this package's backend, get names, numbers and handles as JSON. SGLang takes pickles of
tensors: what torch's own pickles of shared tensors say, written here by hand, because torch would have a further
process look after the memory. Nothing here reads a pickle.
"""

import contextlib
import io
import pickle
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

from explorer_hooks.parts.broadcast.delivery import Tensors, described
from explorer_hooks.parts.broadcast.received import segment_of
from explorer_hooks.parts.broadcast.segments import DIRECTORY, HEADER, Segment, places
from syncd.errors import LoadFailedError, first_line

_DEVICE = 6  # where `rebuild_cuda_tensor` takes the device; SGLang takes the GPU's UUID there


class SharedBucket(ABC):
    """A bucket that other processes of this host and user can open, until it is released."""

    def __init__(self, tensors: Tensors, workers: int) -> None:
        self.tensors, self.workers = tensors, workers

    @property
    @abstractmethod
    def location(self) -> dict[str, str]:
        """Return what a worker must see to open it."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the tensors and where each of them is."""

    @abstractmethod
    def as_pickles(self) -> list[bytes]:
        """Return for each worker the pairs of name and tensor."""

    @abstractmethod
    def fill(self) -> None:
        """Copy the tensors into it, if they are not shared themselves."""

    @abstractmethod
    def release(self) -> None:
        """Give up the memory; workers that have opened it keep it until they close it."""


class SegmentBucket(SharedBucket):
    """A bucket in a segment of shared memory, in which tensors begin at these offsets in bytes."""

    def __init__(self, tensors: Tensors, workers: int, segment: Segment, offsets: Sequence[int]) -> None:
        super().__init__(tensors, workers)
        self._segment, self._offsets = segment, list(offsets)

    @property
    def location(self) -> dict[str, str]:
        return {"segment": self._segment.name}

    def fill(self) -> None:
        """Do nothing: the tensors are in it."""

    def as_json(self) -> dict[str, Any]:
        return {**described(self.tensors), **self.location, "offsets": self._offsets}

    def as_pickles(self) -> list[bytes]:
        """Return a pickle for each worker, with a name of its own: torch removes a name that it has read."""
        names = [self._segment.another_name() for _ in range(self.workers)]
        return [_pickled(list(self._rebuilt(name))) for name in names]

    def release(self) -> None:
        """Remove the names that workers got; the segment is that of the memory to receive into."""
        self._segment.remove_names()

    def _rebuilt(self, name: str) -> Iterator[tuple[str, "_Rebuilt"]]:
        file = (torch.UntypedStorage, b"", f"/{name}".encode(), self._segment.size - HEADER)
        storage = _Rebuilt(reductions.rebuild_storage_filename, file)
        for (key, tensor), offset in zip(self.tensors.items(), self._offsets, strict=True):
            typed = _Rebuilt(reductions.rebuild_typed_storage, (storage, tensor.dtype))
            at = (offset - HEADER) // tensor.element_size()
            layout = (at, tensor.shape, _strides(tensor.shape), False)
            yield key, _Rebuilt(reductions.rebuild_tensor, (torch.Tensor, typed, layout))


class CopiedBucket(SegmentBucket):
    """A bucket in a segment of its own, into which the tensors are copied."""

    def __init__(self, tensors: Tensors, workers: int) -> None:
        offsets, size = places(tensor.nbytes for tensor in tensors.values())
        with _as_load_error(size):
            segment = Segment(size)
        super().__init__(tensors, workers, segment, offsets)

    def fill(self) -> None:
        with _as_load_error(self._segment.size):
            for tensor, offset in zip(self.tensors.values(), self._offsets, strict=True):
                # Written, not mapped: new pages of a mapping would be cleared first, and come one by one.
                flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
                data: Any = flat.numpy()
                self._segment.write(offset, memoryview(data))

    def release(self) -> None:
        self._segment.remove()


class GpuBucket(SharedBucket):
    """A bucket on one GPU: CUDA's handles of the tensors themselves, so nothing is copied on this side.

    They stay as they are until the engine has loaded them. CUDA counts the workers, so each gets handles of its own.
    """

    def __init__(self, tensors: Tensors, workers: int) -> None:
        super().__init__({name: tensor.contiguous() for name, tensor in tensors.items()}, workers)
        try:
            self._shared = [self._exported() for _ in range(workers)]
        except RuntimeError as error:
            problem = f"CUDA does not share the memory of these tensors: {first_line(error)}"
            raise LoadFailedError(problem, hint="push=gloo") from error
        device = next(iter(tensors.values())).device
        self._gpu = str(torch.cuda.get_device_properties(device).uuid)

    @property
    def location(self) -> dict[str, str]:
        return {"gpu": self._gpu}

    def as_json(self) -> dict[str, Any]:
        handles = [[_as_handle(args) for args in exported] for exported in self._shared]
        return {**described(self.tensors), **self.location, "handles": handles}

    def as_pickles(self) -> list[bytes]:
        return [
            _pickled(list(zip(self.tensors, map(self._rebuilt, exported), strict=True)))
            for exported in self._shared
        ]

    def fill(self) -> None:
        """Do nothing: the tensors themselves are shared."""

    def release(self) -> None:
        """Do nothing: CUDA keeps the memory until the workers have closed it."""

    def _exported(self) -> list[tuple[Any, ...]]:
        reduce: Any = reductions.reduce_tensor
        return [reduce(tensor)[1] for tensor in self.tensors.values()]

    def _rebuilt(self, args: tuple[Any, ...]) -> "_Rebuilt":
        return _Rebuilt(reductions.rebuild_cuda_tensor, (*args[:_DEVICE], self._gpu, *args[_DEVICE + 1 :]))


def share(tensors: Tensors, workers: int, *, in_place: bool) -> SharedBucket:
    """Return a bucket of tensors as workers can open it: by handles if they are all on one GPU.

    With `in_place`, tensors in memory of `received.allocate` are shared where they are. A worker that keeps them
    would see what comes into that memory later.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        return GpuBucket(tensors, workers)
    if in_place and (allocated := segment_of(tensors.values())):
        return SegmentBucket(
            tensors, workers, allocated.segment, list(map(allocated.offset, tensors.values()))
        )
    return CopiedBucket(tensors, workers)


@contextlib.contextmanager
def _as_load_error(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{DIRECTORY} of this host does not take {size} bytes: {error.strerror or error}"
        raise LoadFailedError(problem, hint=f"df -h {DIRECTORY}; or push=gloo") from error


@dataclass(frozen=True, eq=False)
class _Rebuilt:
    """In a pickle: whatever a function returns that the reader calls."""

    function: Callable[..., Any]  # the function, by its name
    args: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (obj.function, obj.args) if isinstance(obj, _Rebuilt) else NotImplemented


def _pickled(pairs: Sequence[tuple[str, _Rebuilt]]) -> bytes:
    written = io.BytesIO()
    _Pickler(written, protocol=4).dump(pairs)
    return written.getvalue()


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _as_handle(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return what `rebuild_cuda_tensor` takes, as JSON, but for what every tensor has alike."""
    _, _, stride, offset, _, _, _, memory, size, start, _, counter, at, event, is_awaited = args
    return {
        "stride": list(stride),
        "offset": offset,
        "memory": b64encode(memory).decode(),
        "size": size,
        "start": start,
        "counter": b64encode(counter).decode(),
        "counter_offset": at,
        "event": b64encode(event).decode(),
        "event_is_awaited": is_awaited,
    }
