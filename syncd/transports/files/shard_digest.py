"""What is computed of each byte of a shard on its way to the disk: the check for NaN, the digest, the root."""

import torch

from syncd.protocol.digest import DEFAULT, hasher
from syncd.protocol.roots import TileHasher
from syncd.protocol.safetensors import parse_header
from syncd.transports.files.export_walk import ShardLayout
from syncd.transports.torch_tensors import TO_TORCH, check_finite, view


class ShardDigest:
    """Checks and hashes one shard, whose data comes in pieces.

    Args:
        check: Whether what is not finite is refused.
        has_root: Whether the root is computed too.
    """

    def __init__(self, layout: ShardLayout, *, check: bool, has_root: bool = False) -> None:
        self._check, self._tensors = check, layout.tensors()
        self._tensor = next(self._tensors, None)
        self._state, self._tiles = hasher(DEFAULT), None
        self._state.update(layout.header)
        if has_root:
            self._tiles = TileHasher(parse_header(layout.header, layout.size))
            self._tiles.feed(layout.header)

    def add(self, content: torch.Tensor, start: int) -> None:
        """Take the next bytes of data, which begin at `start`."""
        self._check_finite(content, start)
        self._state.update(view(content))
        if self._tiles is not None:
            self._tiles.feed(view(content))

    @property
    def text(self) -> str:
        """Return the digest of the file as `name:hex`."""
        return f"{DEFAULT}:{self._state.hexdigest()}"

    @property
    def root(self) -> str:
        """Return the root of the file in hexadecimal, empty if none is computed."""
        return self._tiles.hexdigest() if self._tiles is not None else ""

    def _check_finite(self, content: torch.Tensor, start: int) -> None:
        end = start + content.numel()
        while self._check and (tensor := self._tensor) is not None and tensor.start < end:
            part = content[max(tensor.start, start) - start : min(tensor.end, end) - start]
            check_finite(tensor.name, part, TO_TORCH[tensor.dtype])
            if tensor.end > end:
                break
            self._tensor = next(self._tensors, None)
