"""The gateway's HTTP server: uvicorn in a thread, so that the main one can follow the job."""

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from explorer_hooks.follower.health import health_address
from syncd.errors import ConfigError, StorageError, TimedOutError, storage_errors
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.path_trust import weak_level

TOKEN = "token"  # noqa: S105 - the name of a file
_START, _STOP = 30.0, 10.0
_GRACE = 2  # seconds that open requests have at the end
_CALL = 600.0  # seconds that a call into the event loop may take: the journal's disk may be slow
_BACKLOG = 1024
_T = TypeVar("_T")


class HttpThread:
    def __init__(self, application: Starlette, listener: socket.socket) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._listener = listener
        application.router.lifespan_context = self._lifespan
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            log_level="critical",  # requests that fail are reported by the application
            lifespan="on",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @classmethod
    @contextmanager
    def serving(cls, application: Starlette, listener: socket.socket) -> Iterator["HttpThread"]:
        """Serve while the block lasts; at its end, open requests are given a few seconds."""
        made = cls(application, listener)
        made._thread.start()
        try:
            if not made._ready.wait(_START):
                raise ConfigError("the HTTP server did not start")
            yield made
        finally:
            made.stop()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in its event loop, and return the result. Called from another thread."""
        assert self._loop is not None
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: nothing is served any more
            coroutine.close()
            raise
        try:
            return result.result(_CALL)
        except TimeoutError as error:
            if result.done():  # an error of the coroutine's own
                raise
            hint = "dmesg | tail: does the disk of explorer.gateway.directory answer?"
            raise TimedOutError(f"the gateway did nothing for {_CALL:g} s", hint=hint) from error

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_STOP)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            self._server.run(sockets=[self._listener])

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        yield


def listening(text: str) -> socket.socket:
    """Return a socket that listens at `HOST:PORT`."""
    host, port = health_address(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        hint = f"ss -ltnp 'sport = :{port}', or another explorer.gateway.listen"
        raise ConfigError(f"cannot listen on {text} ({error.strerror})", hint=hint) from error
    return made


def own_token(directory: str) -> str:
    """Return the token of the gateway, which is made at its first start."""
    path = os.path.join(directory, TOKEN)
    with storage_errors(path):
        if not os.path.lexists(path):  # nobody else makes one: this process has the journal beside it
            LocalDisk().replace(path, secrets.token_urlsafe(32).encode(), private=True)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            token = file.read().strip()
        weak = weak_level(path, status)
    if weak:
        problem = f"others can replace the gateway's token: {weak.problem}"
        raise ConfigError(problem, path=weak.path, hint=weak.mend)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError("others can read the gateway's token", path=path, hint=f"chmod 600 {path}")
    if not token:
        raise StorageError("the token is empty", path=path, hint=f"rm {path}")
    return token
