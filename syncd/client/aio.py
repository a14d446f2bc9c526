"""The client for asyncio: each call runs in a thread, and cancelling a wait restores the status first."""

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, Self, Unpack

from syncd.client.client import Client, ClientOptions, Role
from syncd.client.follow import Leased
from syncd.client.wait import T, cancelled_by
from syncd.errors import SyncdError
from syncd.protocol.version import Pair, Version

P = ParamSpec("P")


async def run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread, to its end. Cancelling this task ends a wait in it, and that comes first."""
    cancel = threading.Event()
    return await _to_its_end(_start(functools.partial(call, *args, **kwargs), cancel), cancel)


def _start(call: Callable[[], T], cancel: threading.Event) -> "asyncio.Future[T]":
    """Start a call in a thread that nothing else uses: waits are long, and asyncio's own pool has few threads."""

    def work() -> T:
        with cancelled_by(cancel):
            return call()

    pool = ThreadPoolExecutor(1, "syncd-wait")
    try:
        return asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


async def _to_its_end(work: "asyncio.Future[T]", cancel: threading.Event) -> T:
    """Wait until a call in a thread has ended, then raise the cancellation of this task, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            cancel.set()
    if cancelled is not None:
        work.exception()  # asyncio must not report it as never retrieved
        raise cancelled
    return work.result()


class AsyncClient:
    """`Client` for asyncio: each of its methods as a coroutine. `open` makes it."""

    connect: ClassVar[Callable[..., Any]] = Client.open

    def __init__(self, client: Client) -> None:
        self.client, self.job = client, client.job
        self.identity = client.identity  # the name of this process in the job; None for an observer

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
        opening = _start(functools.partial(cls.connect, job_dir, role, identity, **options), cancel)
        try:
            return cls(await _to_its_end(opening, cancel))
        except asyncio.CancelledError:
            # If it was opened in the moment of the cancellation, nobody else would close it.
            if opening.exception() is None:
                await run(opening.result().close)
            raise

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = None if name.startswith("_") else getattr(type(self.client), name, None)
        if not inspect.isfunction(method):
            raise AttributeError(f"{type(self).__name__} has no method {name!r}")

        @functools.wraps(method)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await run(method, self.client, *args, **kwargs)

        return coroutine

    @property
    def confirmed(self) -> Pair | None:
        return self.client.confirmed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await run(self.client.close)
        except SyncdError:
            if error is None:  # the error that ended the body matters more
                raise

    @contextlib.asynccontextmanager
    async def lease(self, version: int | Pair | Version) -> AsyncIterator[Leased]:
        """Keep a version from being removed while it is read; see `Client.lease`."""
        stack = contextlib.ExitStack()
        try:
            yield await run(stack.enter_context, self.client.lease(version))
        finally:
            await run(stack.close)
