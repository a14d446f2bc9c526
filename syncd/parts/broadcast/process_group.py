"""A process group of a broadcast, over gloo or over NCCL, beside whatever `torch.distributed` has.

NCCL has no time-outs: a thread that waits for a member that is gone waits for ever, on the host or on the device. So
a group over NCCL connects in a thread that can be left behind, and later waits end by abort (`aborted_at`). Its
watchdog would end the whole process together with the group; the group is created without one.
"""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, Self

import torch
import torch.distributed

from syncd.client.wait import Deadline
from syncd.parts.broadcast import group_calls
from syncd.parts.broadcast.group_calls import GroupError, always, as_group_error, seconds_left
from syncd.protocol.backend import GLOO, NCCL, Gpu
from syncd.protocol.buckets import BucketPlan
from syncd.protocol.rendezvous import Offer

DIST: Any = torch.distributed  # its type stubs lack half of its names

CPU = torch.device("cpu")

UNDER_WAY = 2  # buckets that are under way at once: the trainer packs one while it sends the other

_BACKLOG = 128
_CONNECT = 2.0
"""Seconds for which torch tries to connect, twice: a root that is gone should not be tried for long."""

_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
"""If it is set, a group over NCCL has neither a watchdog nor a monitor: the caller handles errors and time-outs.

`TORCH_NCCL_ASYNC_ERROR_HANDLING=0` does not suffice: the watchdog would still notify the monitor of the process's
first group, the trainer's own, which then ends the process.
"""

_NOT_FORMED = "the group was not formed"
_FAILED = "the broadcast of a tensor failed"


class ProcessGroup:
    """This process in a separate group, in which rank 0 broadcasts tensors to all others.

        group = ProcessGroup.listen("10.0.0.5", 60.0)       # rank 0 listens at once, then connects
        group.connect([secret], world_size=3, deadline=deadline)
        group = ProcessGroup.join(offer, "e0", deadline, device)

    Args:
        address: This host's address, on which gloo listens. NCCL listens as its own settings say.
        device: Where the tensors are: a GPU for NCCL, main memory for gloo.
        store: Where rank 0 meets the others; None on other ranks.
    """

    def __init__(self, address: str, device: torch.device, store: Any = None, port: int = 0) -> None:
        self.address, self.device, self.port = address, device, port
        self._store = store
        self._group: Any = None
        self._under_way: deque[torch.Tensor] = deque(maxlen=UNDER_WAY)

    @classmethod
    def listen(cls, address: str, seconds: float, device: torch.device = CPU) -> Self:
        """Return rank 0 of a group, which listens on one address only from now on; its store waits for `seconds`."""
        return cls(address, device, *_listen(address, seconds))

    @classmethod
    def join(
        cls,
        offer: Offer,
        identity: str,
        deadline: Deadline,
        device: torch.device,
        takes_part: Callable[[], bool] = always,
    ) -> Self:
        """Return an explorer's end of a group that the trainer offers."""
        rank = offer.members.index(identity) + 1
        with as_group_error(_NOT_FORMED):
            joined = cls(_own_address(offer.address, offer.port), device)
            make = lambda: _reach(offer, rank, joined.address, device, deadline)  # noqa: E731
            joined._group = group_calls.make_in_time(make, deadline, takes_part)
        return joined

    def connect(
        self,
        prefixes: Sequence[str],
        world_size: int,
        deadline: Deadline,
        backend: str = GLOO,
        *,
        greets: bool = True,
    ) -> None:
        """Connect rank 0 to all other ranks, which join meanwhile.

        Args:
            prefixes: Prefixes of the group's keys in the store, the outermost first.
            world_size: Members, this process included.
            greets: Whether all members run this code. Over NCCL others create the communicator with their first
                broadcast: then that may block without a time-out.
        """
        with as_group_error(_NOT_FORMED):
            store = self._store
            for prefix in prefixes:
                store = DIST.PrefixStore(prefix, store)
            self._group = make_group(
                store,
                backend=backend,
                device=self.device,
                rank=0,
                world_size=world_size,
                address=self.address,
                deadline=deadline,
                greets=greets,
            )

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to send a tensor from rank 0, or to receive it; it may be used again after `finish`."""
        with as_group_error(_FAILED):
            self._under_way.append(tensor)
            return start_broadcast(self._group, tensor, deadline)

    def finish(self, work: Any, deadline: Deadline, takes_part: Callable[[], bool] = always) -> None:
        group_calls.finish_broadcast(work, deadline, _FAILED, takes_part)

    def aborted_at(self, deadline: Deadline) -> AbstractContextManager[None]:
        return group_calls.aborted_at(self._group, deadline)

    def abort(self) -> Thread | None:
        """Abort the group, whatever is under way, and return the thread that does; None if there is no group."""
        held, self._group, self._store = [self._group], None, None
        return group_calls.abort(held, *self._under_way)


class FormedGroup(NamedTuple):
    process_group: ProcessGroup
    offer: Offer
    plan: BucketPlan


def gpu_of(device: torch.device) -> Gpu | None:
    """Return what other members need to know of a device for NCCL; None if NCCL cannot use it."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError):  # no driver, or a torch that does not report them
        return None
    return Gpu(uuid, version)


def make_group(
    store: Any,
    *,
    backend: str,
    device: torch.device,
    rank: int,
    world_size: int,
    address: str,
    deadline: Deadline,
    greets: bool = True,
) -> Any:
    """Return torch's process group, connected; over NCCL only if it `greets`: all members run this code."""
    if backend == GLOO:
        return _over_gloo(store, rank, world_size, address, deadline)
    if backend != NCCL or not hasattr(DIST, "ProcessGroupNCCL"):
        raise GroupError(f"torch here has no process group over {backend!r}")
    group = _over_nccl(store, rank, world_size, deadline)
    if not greets:
        return group
    probe = torch.zeros(1, dtype=torch.uint8, device=device)

    def abort(_: Any = None) -> None:
        group_calls.abort([group], probe)

    try:
        _await_members(store, rank, world_size, deadline)
        # The first broadcast creates the communicator, in all members at once; NCCL may block without a time-out.
        begin = lambda: start_broadcast(group, probe, deadline)  # noqa: E731
        work = group_calls.make_in_time(begin, deadline, discard=abort)
        group_calls.finish_broadcast(work, deadline, "its members did not connect")
    except BaseException:
        abort()  # does not reach a communicator that does not exist yet: `discard` aborts once more
        raise
    return group


def start_broadcast(group: Any, tensor: torch.Tensor, deadline: Deadline) -> Any:
    """Begin to broadcast a tensor from rank 0 and return its work, which `finish_broadcast` waits for."""
    options = DIST.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds_left(deadline))
    return group.broadcast([tensor], options)


def _listen(address: str, seconds: float) -> tuple[Any, int]:
    with (
        as_group_error(f"cannot listen on {address}"),
        socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG) as listening,
    ):
        port: int = listening.getsockname()[1]
        store = DIST.TCPStore(
            address,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


def _reach(offer: Offer, rank: int, own_address: str, device: torch.device, deadline: Deadline) -> Any:
    """Return the group of an offer once this process has reached its store."""
    # The store listened before it was offered. If nothing listens now, torch would retry beyond its time-out.
    with socket.create_connection((offer.address, offer.port), seconds_left(deadline)):
        pass
    timeout = timedelta(seconds=min(_CONNECT, seconds_left(deadline)))
    store = DIST.TCPStore(offer.address, offer.port, None, False, timeout, wait_for_workers=False)  # noqa: FBT003
    store.set_timeout(timedelta(seconds=seconds_left(deadline)))
    return make_group(
        DIST.PrefixStore(offer.secret, store),
        backend=offer.backend,
        device=device,
        rank=rank,
        world_size=offer.world_size,
        address=own_address,
        deadline=deadline,
    )


def _over_gloo(store: Any, rank: int, world_size: int, address: str, deadline: Deadline) -> Any:
    options = DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - nothing else sets the address to listen on
    options._timeout = timedelta(seconds=seconds_left(deadline))  # noqa: SLF001
    options._devices = [DIST.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return DIST.ProcessGroupGloo(store, rank, world_size, options)


def _over_nccl(store: Any, rank: int, world_size: int, deadline: Deadline) -> Any:
    options = DIST.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds_left(deadline))  # noqa: SLF001 - how long abort may take
    with _unwatched():
        return DIST.ProcessGroupNCCL(store, rank, world_size, options)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Create groups without a watchdog in the body; only the environment can ask for that."""
    before = os.environ.get(_UNWATCHED)
    os.environ[_UNWATCHED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNWATCHED]
        else:
            os.environ[_UNWATCHED] = before


def _await_members(store: Any, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait until all members are connected to the store: NCCL itself waits for one that is gone for ever."""
    with as_group_error("not all members came"):
        store.set(f"here/{rank}", "1")
        store.wait(
            [f"here/{member}" for member in range(world_size)], timedelta(seconds=seconds_left(deadline))
        )


def _own_address(address: str, port: int) -> str:
    """Return this host's address on the route to another; nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own: str = probe.getsockname()[0]
        return own


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
