"""How tensors get into memory that waits for them: cast, brought from their device, and by two threads."""

import contextlib
import ctypes
from collections import deque
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Self

import torch

from syncd.transports.filesystem.layout import ALIGN

_WORTH_A_THREAD = 1 << 20  # bytes: a tenth of a millisecond, several times what a thread takes to wake
_UNDER_WAY = 4
"""Copies that are left to the helper at most. It never runs dry, so that it need not be woken for each."""


class Copies:
    """Copies of tensors, half of each large one by a helper, all of them done when the `with` block ends.

    Args:
        helper: A thread with nothing else to do.
    """

    def __init__(self, helper: Executor) -> None:
        self._helper = helper
        self._under_way: deque[Future[None]] = deque()
        self._device = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.finish()

    def add(self, target: torch.Tensor, source: torch.Tensor, *, lasts: bool = False) -> None:
        """Copy a tensor over one of the same shape; what is left under way is done after `finish`.

        Args:
            target: Contiguous, in main memory.
            source: The tensor.
            lasts: Whether it stays as it is until `finish`; else it is copied when this returns. From a device it is
                only begun in either case: its memory is kept by the device's stream.
        """
        if source.is_cuda:
            self._device = True
            target.copy_(source, non_blocking=True)
        elif target.nbytes < _WORTH_A_THREAD or not source.is_contiguous():
            copy(target, source)
        else:
            self._halve(target.view(-1), source.view(-1))
            if not lasts:
                self._wait(0)

    def finish(self) -> None:
        """Wait until everything is copied."""
        self._wait(0)
        if self._device:
            torch.cuda.synchronize()

    def _halve(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._wait(_UNDER_WAY - 1)
        half = target.numel() // 2 // ALIGN * ALIGN
        self._under_way.append(self._helper.submit(copy, target[half:], source[half:]))
        copy(target[:half], source[:half])

    def _wait(self, most: int) -> None:
        """Wait until no more than so many are under way; all of them, whatever becomes of one."""
        failed: list[BaseException] = []
        while len(self._under_way) > most:
            error = self._under_way.popleft().exception()
            failed += [] if error is None else [error]
        if failed:
            self._wait(0)
            raise failed[0]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor over one of the same shape, cast and brought from its device where it must be.

    A plain copy in main memory is left to libc: torch's takes up to twice as long unless all cores idle.
    """
    if source.dtype == target.dtype and source.is_cpu and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)
