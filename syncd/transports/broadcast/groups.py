"""Makes the process group of a broadcast, over gloo or over NCCL; torch is handed in.

NCCL knows no time-out: who waits for a member that has gone waits for ever, in the host or on the device. So a group
over it is connected by a thread that can be left behind, and what goes on after that is ended by abort
(`carrying.bounded`). Its watchdog would end the process with the group; it is made without one.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from syncd.client.wait import Deadline
from syncd.protocol.backend import GLOO, NCCL, Gpu
from syncd.transports.broadcast import carrying
from syncd.transports.broadcast.carrying import GroupError

_BACKLOG = 128

_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
"""Set, a group over NCCL has neither a watchdog nor a monitor of it: the caller looks after errors and time.

`TORCH_NCCL_ASYNC_ERROR_HANDLING=0` would not do: the watchdog would still tell the monitor of the process's first
group, the trainer's own, which then ends the process.
"""


def gpu_of(torch: Any, device: Any) -> Gpu | None:
    """Return what other members need to know of a device for NCCL; None where it cannot be used there."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        version = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):  # no driver, or a torch that cannot say
        return None
    return Gpu(uuid, version)


def listen(torch: Any, address: str, seconds: float) -> tuple[Any, int]:
    """Return a store that listens from now on, on one address only, and its port.

    Args:
        torch: The module.
        address: The address to listen on.
        seconds: How long the store waits for anything.

    Raises:
        GroupError: It cannot listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        carrying.told(f"cannot listen on {address}"),
        socket.socket(family, socket.SOCK_STREAM) as listening,
    ):
        listening.bind((address, 0))
        listening.listen(_BACKLOG)
        port: int = listening.getsockname()[1]
        store = torch.distributed.TCPStore(
            address,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


def make_group(
    torch: Any,
    store: Any,
    *,
    backend: str,
    device: Any,
    rank: int,
    world_size: int,
    address: str,
    deadline: Deadline,
) -> Any:
    """Return a group of its own.

    Args:
        torch: The module.
        store: Where its members find each other.
        backend: nccl or gloo.
        device: Where buckets are: a GPU for nccl, main memory for gloo.
        rank: This process's.
        world_size: Of all members.
        address: This host's, on which gloo listens. NCCL listens as its own settings say.
        deadline: When to give up.

    Raises:
        GroupError: No such group can be made here, or a member has gone.
        TimedOutError: The deadline has passed.
    """
    dist = torch.distributed
    if backend == NCCL and hasattr(dist, "ProcessGroupNCCL"):
        group = _over_nccl(dist, store, rank, world_size, deadline)
        first = _First(dist, group, torch.zeros(1, dtype=torch.uint8, device=device), deadline)
        try:
            _assemble(store, rank, world_size, deadline)
            first.carry()
        except BaseException:
            first.give_up()
            raise
        return group
    if backend == GLOO:
        return _over_gloo(dist, store, rank, world_size, address, deadline)
    raise GroupError(f"no group over {backend!r} can be made here")


def _over_gloo(dist: Any, store: Any, rank: int, world_size: int, address: str, deadline: Deadline) -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - no other says where it listens
    options._timeout = timedelta(seconds=carrying.left(deadline))  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _over_nccl(dist: Any, store: Any, rank: int, world_size: int, deadline: Deadline) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=carrying.left(deadline))  # noqa: SLF001 - how long abort may take
    with _unwatched():
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Have groups made without a watchdog; the environment is the only way to say so."""
    before = os.environ.get(_UNWATCHED)
    os.environ[_UNWATCHED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNWATCHED]
        else:
            os.environ[_UNWATCHED] = before


def _assemble(store: Any, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait until all members are here: NCCL's own start waits for one that has gone without an end."""
    with carrying.told("not all members came"):
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{one}" for one in range(world_size)], timedelta(seconds=carrying.left(deadline)))


class _First(Thread):
    """The first broadcast of a group, of one byte: its communicator is made with it, by all members at once.

    Who gives it up has it aborted, before or after it returns.
    """

    def __init__(self, dist: Any, group: Any, probe: Any, deadline: Deadline) -> None:
        super().__init__(name="broadcast-connect", daemon=True)
        self._dist, self._group, self._probe, self._deadline = dist, group, probe, deadline
        self._given_up = Event()
        self._work: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Begin to carry the byte; this may stand in NCCL for as long as it likes."""
        try:
            self._work = carrying.carry(self._dist, self._group, self._probe, self._deadline)
        except Exception as error:  # noqa: BLE001 - raised again in who waits for it
            self._error = error
        if self._given_up.is_set():  # a communicator that was not there yet is not aborted with its group
            carrying.abort([self._group], self._probe)

    def carry(self) -> None:
        """Wait until the byte is through."""
        self.start()
        while self.is_alive():
            self.join(carrying.left(self._deadline))
        if self._error is not None:
            raise self._error
        carrying.finish(self._work, self._deadline, "its members did not connect")

    def give_up(self) -> None:
        """Abort it, now and again once the thread ends."""
        self._given_up.set()
        carrying.abort([self._group], self._probe)
