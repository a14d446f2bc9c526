"""The broadcast's own process group, at its root, beside whatever `torch.distributed` has. It is gloo's."""

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed

from syncd.errors import TimedOutError, TryAgainError
from syncd.synchronizer.waiting import Deadline

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

_LOOK = 0.0005
"""Seconds between two looks whether a bucket is through."""

_BACKLOG = 128


class GroupError(TryAgainError):
    """The group is broken: a member has gone, or the link."""

    code = "broadcast_failed"


class Root:
    """The trainer's end of a group. Listens from the first moment on, on one address only.

    Args:
        address: The address to listen on.
        timeout: Seconds that the store waits for anything.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with _told(f"cannot listen on {address}"), socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((address, 0))
            listening.listen(_BACKLOG)
            self.port: int = listening.getsockname()[1]
            self._store: Any = _DIST.TCPStore(
                address,
                self.port,
                None,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._group: Any = None

    def form(self, world_size: int, secret: str, deadline: Deadline) -> None:
        """Connect to all members.

        Raises:
            GroupError: Not all of them came in time.
        """
        with _told("the group was not formed"):
            store = _DIST.PrefixStore(secret, self._store)
            self._group = _make_group(store, world_size, self.address, deadline)

    def send(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to send a bucket; it must not change before `finish`.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=_left(deadline))
        with _told("a bucket was not sent"):
            return self._group.broadcast([bucket], options)

    def abort(self) -> None:
        """End the group at once, whatever is under way; what waits in it ends by its own time."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            Thread(target=_abort, args=[group], name="broadcast-abort", daemon=True).start()


def _make_group(store: Any, world_size: int, address: str, deadline: Deadline) -> Any:
    """Return a process group of its own; all its waits end at the deadline."""
    left = timedelta(seconds=_left(deadline))
    options = _DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - no other says where it listens
    options._timeout = left  # noqa: SLF001
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return _DIST.ProcessGroupGloo(store, 0, world_size, options)


def finish(work: Any, deadline: Deadline) -> None:
    """Wait until a bucket is through.

    Raises:
        GroupError: It will never be.
        TimedOutError: It is not, in time.
    """
    while not work.is_completed():
        _left(deadline)
        time.sleep(_LOOK)
    with _told("a bucket was not sent"):
        work.wait()


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    if left <= 0:
        raise TimedOutError(f"the broadcast has not ended within {deadline.seconds:g} s")
    return left


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise GroupError(f"{what}: {(str(error).splitlines() or [''])[0]}") from error
