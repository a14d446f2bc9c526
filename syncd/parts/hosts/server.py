"""Gives pieces to other hosts: bounded connections, each for one request, and nobody without the job's token."""

import contextlib
import hmac
import json
import os
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from syncd.errors import ConfigError
from syncd.http_server import BoundedServer, QuietHandler
from syncd.parts.hosts.shelf import Holding, Shelf
from syncd.parts.hosts.threads import start_thread

TOKEN_HEADER = "X-Syncd-Token"  # noqa: S105 - a name of a header

MOST_CONNECTIONS = 512
LIMIT = 300.0  # seconds that a connection may last
WAIT = 10.0  # seconds that a request waits for a piece that is on its way

_IDLE = 20.0
_POLL = 0.1
_PIECE = re.compile(
    r"/piece/(copy|containers)/([0-9a-f]{16})/(\d{1,9})/(\d{1,6})/(\d{1,16})/(\d{1,16})", re.ASCII
)
_HAVE = re.compile(r"/have/(copy|containers)/([0-9a-f]{16})", re.ASCII)


class Getting(Protocol):
    """What this process is getting."""

    def await_piece(self, number: int, seconds: float) -> bool:
        """Wait until a piece is proven; return whether it is."""


class PieceServer(BoundedServer):
    """Answers other hosts.

    Args:
        token: Returns the job's token, None if there is none: then nobody is answered.
        getting: Returns what this process is getting of a step, None if it is getting nothing.
    """

    task = "give pieces to other hosts"
    most_connections = MOST_CONNECTIONS
    busy = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

    def __init__(
        self,
        address: str,
        port: int,
        shelf: Shelf,
        token: Callable[[], str | None],
        getting: Callable[[str, str], Getting | None],
    ) -> None:
        self.shelf, self.token, self.getting = shelf, token, getting
        self.served = 0
        super().__init__(address, port, PieceHandler, limit=LIMIT, hint=f"ss -ltnp 'sport = :{port}'")

    def start(self) -> None:
        try:
            start_thread(self.serve_forever, "pieces")
        except BaseException:
            self.server_close()
            raise

    def add_served(self, length: int) -> None:
        self.served += length


class PieceHandler(QuietHandler):
    """Answers one request."""

    server: PieceServer
    timeout = _IDLE

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        token = self.server.token()
        if token is None or not hmac.compare_digest(
            self.headers.get(TOKEN_HEADER, "").encode(), token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN)
        elif (match := _HAVE.fullmatch(self.path)) is not None:
            self._have(match[1], match[2])
        elif (match := _PIECE.fullmatch(self.path)) is not None:
            self._piece(match[1], match[2], *(int(number) for number in match.groups()[2:]))
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def _have(self, kind: str, digest: str) -> None:
        holding = self.server.shelf.find(kind, digest)
        if holding is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with contextlib.closing(holding):
            body = json.dumps({"whole": holding.marks is None}).encode()
        self._answer(HTTPStatus.OK, len(body))
        self.wfile.write(body)

    def _piece(self, kind: str, digest: str, number: int, file: int, offset: int, length: int) -> None:
        holding = self._await_piece(kind, digest, number)
        if holding is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with contextlib.closing(holding):
            if not holding.has(number):
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
                return
            self._send(holding, file, offset, length)

    def _await_piece(self, kind: str, digest: str, number: int) -> Holding | None:
        """Return what the host has once the piece is there, or as it is when the time is up."""
        holding = self.server.shelf.find(kind, digest)
        if holding is None or holding.has(number):
            return holding
        getting = self.server.getting(kind, digest)
        if getting is not None:
            holding.close()
            getting.await_piece(number, WAIT)
            return self.server.shelf.find(kind, digest)
        until = time.monotonic() + WAIT  # another process of this host gets it
        while holding is not None and not holding.has(number) and time.monotonic() < until:
            holding.close()
            time.sleep(_POLL)
            holding = self.server.shelf.find(kind, digest)
        return holding

    def _send(self, holding: Holding, file: int, offset: int, length: int) -> None:
        try:
            path = f"{holding.path}/{holding.names[file]}"
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (IndexError, OSError):
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with open(descriptor, "rb", buffering=0) as content:
            if offset + length > os.fstat(descriptor).st_size or not length:
                self._answer(HTTPStatus.NOT_FOUND)
                return
            self._answer(HTTPStatus.OK, length)
            self.wfile.flush()
            self.connection.sendfile(content, offset, length)
            self.server.add_served(length)

    def _answer(self, status: HTTPStatus, length: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()


def bind_or_none(open_server: Callable[[], PieceServer]) -> PieceServer | None:
    """Return a server, None if the address is taken: another process of this host listens."""
    try:
        return open_server()
    except ConfigError as error:
        if "in use" in str(error):
            return None
        raise
