"""The client for asyncio: each call runs in a thread, and cancelling a wait restores the status first."""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from syncd.client.client import Client, ClientOptions, Role
from syncd.client.lease import Leased
from syncd.client.wait import T
from syncd.errors import SyncdError
from syncd.protocol.layout import Job
from syncd.protocol.version import Pair, Version

P = ParamSpec("P")
C_co = TypeVar("C_co", bound=Client, covariant=True)


async def run_call(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run file work in a thread, to its end even if this task is cancelled meanwhile."""
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs)), None)


async def run_wait(wait: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a wait that takes `cancel` in a thread; cancelling this task sets it, and the wait ends first."""
    cancel = threading.Event()
    return await _to_its_end(
        _own_thread(functools.partial(wait, *args, **{**kwargs, "cancel": cancel})), cancel
    )


def _own_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Start work in a thread that nothing else uses: waits are long, and the default pool has few threads."""
    pool = ThreadPoolExecutor(1, "syncd-wait")
    try:
        return asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


async def _to_its_end(work: "asyncio.Future[T]", cancel: threading.Event | None) -> T:
    """Wait until work in a thread has ended, then raise the cancellation of this task, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            if cancel is not None:
                cancel.set()
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # asyncio must not report it as never retrieved
        raise cancelled
    return work.result()


def threaded(
    method: Callable[Concatenate[C_co, P], T],
) -> "Callable[Concatenate[AsyncClient[C_co], P], Coroutine[Any, Any, T]]":
    """Return the coroutine of a method that does file work."""

    @functools.wraps(method)
    async def call(self: "AsyncClient[C_co]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_call(method, self.client, *args, **kwargs)

    return call


def waited(
    method: Callable[Concatenate[C_co, P], T],
) -> "Callable[Concatenate[AsyncClient[C_co], P], Coroutine[Any, Any, T]]":
    """Return the coroutine of a method that waits."""

    @functools.wraps(method)
    async def call(self: "AsyncClient[C_co]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_wait(method, self.client, *args, **kwargs)

    return call


class AsyncClient(Generic[C_co]):
    """`Client` for asyncio: the same methods as coroutines.

    Args:
        client: The connection; `open` makes it.
    """

    connect: ClassVar[Callable[..., Any]] = Client.open

    def __init__(self, client: C_co) -> None:
        self.client = client

    @classmethod
    async def open(
        cls,
        job_dir: str | os.PathLike[str],
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> Self:
        """Connect to a job; see `Client.open`."""
        cancel = threading.Event()
        opening = _own_thread(lambda: cls.connect(job_dir, role, identity, **{**options, "cancel": cancel}))
        try:
            return cls(await _to_its_end(opening, cancel))
        except asyncio.CancelledError:
            # If it was opened in the moment of the cancellation, nobody else would close it.
            if opening.exception() is None:
                await run_call(opening.result().close)
            raise

    @property
    def identity(self) -> str | None:
        """Return the name of this process in the job; None for an observer."""
        return self.client.identity

    @property
    def job(self) -> Job:
        """Return the job."""
        return self.client.job

    @property
    def confirmed(self) -> Pair | None:
        """Return the version that this process confirmed last."""
        return self.client.confirmed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except SyncdError:
            if error is None:  # the error that ended the body matters more
                raise

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Pair | Version) -> AsyncIterator[Leased]:
        """Keep a version from being removed while it is read; see `Client.lease`."""
        stack = contextlib.ExitStack()
        try:
            yield await run_call(stack.enter_context, self.client.lease(version))
        finally:
            await run_call(stack.close)

    close = threaded(Client.close)
    beat = threaded(Client.beat)
    describe = threaded(Client.describe)
    set_status = threaded(Client.set_status)
    trainer_requires_weight_sync = threaded(Client.trainer_requires_weight_sync)
    explorer_requires_sync = threaded(Client.explorer_requires_sync)
    answer_nothing_new = threaded(Client.answer_nothing_new)
    publish = threaded(Client.publish)
    publish_received = threaded(Client.publish_received)
    count_receipts = threaded(Client.count_receipts)
    publish_copies = threaded(Client.publish_copies)
    latest_version = threaded(Client.latest_version)
    confirm = threaded(Client.confirm)

    vacate = waited(Client.vacate)
    wait_for = waited(Client.wait_for)
    wait_for_version = waited(Client.wait_for_version)
