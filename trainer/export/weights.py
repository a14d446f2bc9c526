"""What an export reads: whole tensors by name, one at a time."""

import errno
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk
from syncd.protocol.safetensors import read_header
from syncd.transports.dtypes import TO_TORCH


class Kind(NamedTuple):
    """What a tensor is, known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights(Protocol):
    """The weights of one model, wherever they are."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Return what each tensor is, by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return one whole tensor in main memory, which is all the memory that it takes.

        Raises:
            SyncdError: It cannot be read, or its parts do not make one tensor.
        """


class SafetensorsFiles:
    """Weights in safetensors files, mapped into memory.

    Args:
        disk: Where they are.
        paths: The files.

    Raises:
        CorruptDataError: A header is damaged, a dtype is not one of torch, or a tensor is there twice.
    """

    def __init__(self, disk: Disk, paths: Iterable[str]) -> None:
        self.kinds: dict[str, Kind] = {}
        self._paths: dict[str, str] = {}
        for path in paths:
            for tensor in read_header(disk, path).tensors.values():
                if tensor.name in self.kinds:
                    raise CorruptDataError(f"tensor {tensor.name!r} is in two files", path=path)
                if tensor.dtype not in TO_TORCH:
                    raise CorruptDataError(f"tensor {tensor.name!r} is {tensor.dtype}", path=path)
                self.kinds[tensor.name] = Kind(TO_TORCH[tensor.dtype], tensor.shape)
                self._paths[tensor.name] = path

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; its pages stay those of the file."""
        path = self._paths[name]
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except SafetensorError as error:
            raise CorruptDataError(f"tensor {name!r} cannot be read: {error}", path=path) from error
        assert isinstance(tensor, torch.Tensor)
        return tensor
