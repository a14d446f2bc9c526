"""Tensors of torch and their bytes in safetensors files: dtypes, the check for NaN, memory, and filling from bytes.

A step that holds NaN or infinity would poison every explorer that loads it.
"""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from syncd.errors import TROUBLESHOOTING, ConfigError, NonFiniteError
from syncd.protocol.safetensors import ALIGN
from syncd.transports.tensors import TensorMeta

TO_TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""What torch calls each dtype of safetensors that it has."""

FROM_TORCH = {dtype: name for name, dtype in TO_TORCH.items()}

_CHUNK = 2 << 20

# The bits of the exponent. All of them are set exactly if a number is not finite.
_EXPONENT = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def check_finite(name: str, content: torch.Tensor, dtype: torch.dtype) -> None:
    """Check the bytes of whole elements, in main memory.

    Read as integers, what is not finite lies above every number of its sign: the positive ones where the sign
    bit makes an integer negative, the negative ones where it makes it large. Two maxima read 12 GB/s on
    one core and need no memory; `isfinite` reads 0.2.
    """
    if dtype not in _EXPONENT:
        return
    exponent, sign = _EXPONENT[dtype], 1 << (8 * dtype.itemsize - 1)
    content_bytes = content.numpy()
    for start in range(0, content.numel(), _CHUNK):
        chunk = content_bytes[start : start + _CHUNK]
        signed, unsigned = chunk.view(f"i{dtype.itemsize}"), chunk.view(f"u{dtype.itemsize}")
        if int(np.max(signed)) >= exponent or int(np.max(unsigned)) >= sign | exponent:
            raise _refusal(name)


class DeviceFiniteCheck:
    """Checks tensors where they are. What a device finds is collected, and read once at the end."""

    def __init__(self) -> None:
        self._flags: list[tuple[str, torch.Tensor]] = []

    def check(self, name: str, content: torch.Tensor, dtype: torch.dtype) -> None:
        if content.is_cpu:
            check_finite(name, content, dtype)
        elif dtype in _EXPONENT:
            self._flags.append((name, is_finite(content, dtype)))

    def require(self) -> None:
        flags, self._flags = self._flags, []
        if not flags:
            return
        values = torch.stack([flag for _, flag in flags]).tolist()
        for (name, _), finite in zip(flags, values, strict=True):
            if not finite:
                raise _refusal(name)


def is_finite(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return whether all elements of some bytes are finite: a scalar that the device computes later."""
    elements = content.view(dtype)
    wide = elements.float() if dtype.itemsize == 1 else elements
    return wide.isfinite().all()


def _refusal(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"tensor {name!r} holds NaN or infinity: the step is not written",
        hint="check the loss and the gradient norm of the last steps, or lower the learning rate: "
        f"{TROUBLESHOOTING}#weights-that-are-not-finite",
    )


class TargetTensors(NamedTuple):
    """Tensors that a load fills: each under one name, and the other names of those that have several."""

    tensors: Mapping[str, torch.Tensor]
    metas: Mapping[str, TensorMeta]  # dtype and shape of each
    aliases: Mapping[str, str]  # other names, each with the one under which `tensors` has the same memory


def target_tensors(tensors: Mapping[str, torch.Tensor]) -> TargetTensors:
    """Return tensors by name; those that are the same memory under their first name only."""
    metas = {name: meta_of(name, tensor) for name, tensor in tensors.items()}
    first: dict[object, str] = {}
    owners = {
        name: first.setdefault((tensor.numel() and memory_of(tensor)) or name, name)
        for name, tensor in tensors.items()
    }
    own = [name for name in tensors if owners[name] == name]
    return TargetTensors(
        {name: tensors[name].detach() for name in own},
        {name: metas[name] for name in own},
        {name: other for name, other in owners.items() if name != other},
    )


def memory_of(tensor: torch.Tensor) -> object:
    """Return where the elements are, None for a tensor that has no memory.

    Of a sharded tensor it is where this rank's part is, or would be: ranks without a part of it must find the same
    as the others, and all empty tensors have the same address. FSDP keeps padding for them, in a storage of its own.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    storage = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    if not storage:
        return None
    layout = tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return str(tensor.device), storage, *layout


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.dtype not in FROM_TORCH:
        raise ConfigError(
            f"tensor {name} cannot be filled: {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"tensor {name} is sharded over ranks", hint="pass the model of one process")
    return TensorMeta(FROM_TORCH[tensor.dtype], tuple(tensor.shape))


def is_straight(tensor: torch.Tensor, dtype: str) -> bool:
    """Return whether the bytes of a file are the bytes of a tensor, so that they can be read straight into it."""
    return tensor.device.type == "cpu" and tensor.dtype == TO_TORCH[dtype] and tensor.is_contiguous()


def view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in main memory."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined] # the view keeps the memory alive
    return memoryview(array).cast("B")


def aligned_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Return `size` bytes that begin at a multiple of `ALIGN`, pinned if a device is filled from them."""
    if pinned and torch.cuda.is_available():
        memory = torch.empty(size + ALIGN, dtype=torch.uint8, pin_memory=True)
        return memory[-memory.data_ptr() % ALIGN :][:size]
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def assign(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> bool:
    """Give tensors the values of others, by name; return whether one of them uses the memory of its value now.

    A parameter in main memory takes over the memory of its value, without a copy, if dtype, shape and strides are the
    same. All others are filled: whoever else refers to their memory (a detached tensor of a `state_dict()`, another
    process, a CUDA graph) would not see that it moved.
    """
    owners: dict[object, set[int]] = {}
    for target in targets.values():
        owners.setdefault(memory_of(target), set()).add(id(target))
    moved = False
    with torch.no_grad():
        for name, value in values.items():
            target = targets[name]
            if _can_move(target, value) and len(owners[memory_of(target)]) == 1:
                target.data = value
                moved = True
            else:
                target.copy_(value)
    return moved


def release_free_memory() -> None:
    """Give memory that was freed back to the system; glibc keeps that of tensors below 32 MiB otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _can_move(target: torch.Tensor, value: torch.Tensor) -> bool:
    if not isinstance(target, torch.nn.Parameter) or not target.is_cpu or target.is_shared():  # type: ignore[no-untyped-call]
        return False
    same = target.dtype == value.dtype and target.shape == value.shape and target.stride() == value.stride()
    return same and value.is_cpu


@torch.inference_mode()
def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor over one of the same shape, cast and brought from its device where it must be.

    A plain copy in main memory is left to libc: torch's takes up to twice as long unless all cores idle.
    """
    if source.dtype == target.dtype and source.is_cpu and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def put(tensor: torch.Tensor, dtype: str, start: int, content: torch.Tensor) -> None:
    """Copy bytes of a tensor, contiguous, from the memory that they were read to; cast and move them to its device.

    The tensor may have any strides, dtype and device. `dtype` and `start`, the offset of the first byte in the
    tensor, are those of the file.
    """
    if content.data_ptr() % 8:
        content = content.clone()
    elements = content.view(TO_TORCH[dtype])
    _fill(tensor, start // elements.dtype.itemsize, elements)


def _fill(tensor: torch.Tensor, first: int, elements: torch.Tensor) -> None:
    """Copy over elements of a tensor from one on, in row-major order; whole rows by one copy."""
    flat, count = tensor.view(-1) if tensor.is_contiguous() else tensor, elements.numel()
    if flat.dim() == 1:
        flat[first : first + count].copy_(elements)
        return
    inner = math.prod(flat.shape[1:])
    row, within = divmod(first, inner)
    head = min(-first % inner, count)
    rows = (count - head) // inner
    if head:
        _fill(flat[row], within, elements[:head])
        row += 1
    if rows:
        flat[row : row + rows].copy_(elements[head : head + rows * inner].view(rows, *flat.shape[1:]))
    if tail := count - head - rows * inner:
        _fill(flat[row + rows], 0, elements[count - tail :])
