"""Memory into which weights are received, and which the workers of an engine on this host can open as it is."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from explorer_hooks.parts.broadcast.segments import HEADER, Segment


@dataclass(frozen=True, eq=False)
class AllocatedSegment:
    """Shared memory that tensors of this process use."""

    segment: Segment
    start: int  # the address of its first byte
    end: int  # the address behind its last one

    def has(self, tensor: torch.Tensor) -> bool:
        if not tensor.numel():
            return True
        begin = tensor.data_ptr()
        return tensor.is_contiguous() and self.start <= begin and begin + tensor.nbytes <= self.end

    def offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self.start + HEADER if tensor.numel() else HEADER

    def remove(self) -> None:
        _allocated.remove(self)
        self.segment.remove()


_allocated: list[AllocatedSegment] = []


def allocate(size: int) -> torch.Tensor:
    """Return so many bytes of main memory, shared if there is room; a bucket of tensors in it needs no copy.

    The segment is removed when no tensor uses it any more.
    """
    segment = None
    try:
        segment = Segment(size + HEADER)
        reserved = segment.reserve()
    except OSError:
        if segment is not None:
            segment.remove()
        return torch.empty(size, dtype=torch.uint8)
    memory = torch.frombuffer(reserved, dtype=torch.uint8, count=size, offset=HEADER)
    made = AllocatedSegment(segment, memory.data_ptr(), memory.data_ptr() + size)
    _allocated.append(made)
    weakref.finalize(reserved, made.remove)  # the tensor has it
    return memory


def segment_of(tensors: Iterable[torch.Tensor]) -> AllocatedSegment | None:
    wanted = list(tensors)
    return next((segment for segment in _allocated if all(map(segment.has, wanted))), None)
