"""Where tensors are read to: parameters that exist, and the little memory that bytes pass through on their way."""

import ctypes
import mmap
from collections.abc import Mapping
from typing import NamedTuple

import torch

from syncd.errors import ConfigError
from syncd.transports.filesystem.read_plan import Part, blocks
from syncd.transports.tensors import TensorMeta

ALIGN = 4096
"""What O_DIRECT asks of memory, offsets and lengths on every file system known."""

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""What torch calls each dtype of safetensors that it has."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Held(NamedTuple):
    """Tensors that are to be filled: each under one name, and the other names of those that have several.

    Args:
        tensors: The tensors.
        metas: What each of them is.
        aliases: Other names, each with the one that stands for it.
    """

    tensors: Mapping[str, torch.Tensor]
    metas: Mapping[str, TensorMeta]
    aliases: Mapping[str, str]


def held(tensors: Mapping[str, torch.Tensor]) -> Held:
    """Return tensors by name, those that are the same memory under their first name only.

    Raises:
        ConfigError: One cannot be filled from a file.
    """
    metas = {name: meta_of(name, tensor) for name, tensor in tensors.items()}
    first: dict[object, str] = {}
    one = {name: first.setdefault(_identity(name, tensor), name) for name, tensor in tensors.items()}
    own = [name for name in tensors if one[name] == name]
    return Held(
        {name: tensors[name].detach() for name in own},
        {name: metas[name] for name in own},
        {name: other for name, other in one.items() if name != other},
    )


def _identity(name: str, tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Return what a tensor is.

    Raises:
        ConfigError: It cannot be filled from a file: it has no memory of its own here, or a dtype of its own kind.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise ConfigError(
            f"tensor {name} cannot be filled: {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"tensor {name} is sharded over ranks", hint="give the model of one process")
    return TensorMeta(_NAMES[tensor.dtype], tuple(tensor.shape))


def is_straight(tensor: torch.Tensor, dtype: str) -> bool:
    """Say whether the bytes of a file are the bytes of a tensor, so that they can be read right into it."""
    return tensor.device.type == "cpu" and tensor.dtype == DTYPES[dtype] and tensor.is_contiguous()


def view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in main memory."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined] # the memory is there for as long as the view is
    return memoryview(array).cast("B")


def bounce(size: int, *, pinned: bool) -> torch.Tensor:
    """Return `size` bytes that begin at a multiple of `ALIGN`, pinned where devices are filled from them."""
    if pinned and torch.cuda.is_available():
        memory = torch.empty(size + ALIGN, dtype=torch.uint8, pin_memory=True)
        return memory[-memory.data_ptr() % ALIGN :][:size]
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


@torch.inference_mode()
def put(tensor: torch.Tensor, dtype: str, part: Part, content: torch.Tensor) -> None:
    """Copy one part of a tensor from where it was read to, cast and brought to its device where it must be.

    Args:
        tensor: The tensor to fill, of any strides, dtype and device.
        dtype: The dtype of the file.
        part: Which bytes of the tensor, as the file has it.
        content: These bytes, contiguous.
    """
    if content.data_ptr() % 8:
        content = content.clone()
    elements = content.view(DTYPES[dtype])
    start = part.start // elements.dtype.itemsize
    if tensor.is_contiguous():
        tensor.view(-1)[start : start + elements.numel()].copy_(elements)
        return
    for block in blocks(tuple(tensor.shape), start, start + elements.numel()):
        target = tensor[block.within][block.start : block.stop]
        target.copy_(elements[: target.numel()].view(target.shape))
        elements = elements[target.numel() :]
