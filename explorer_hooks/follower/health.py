"""The endpoint for load balancers: a request is answered with 200 while the engine is ready, and else with 503."""

import contextlib
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from syncd.errors import UsageError
from syncd.http_server import BoundedServer, QuietHandler

Health = tuple[bool, dict[str, Any]]  # whether the engine is ready, and the fields of the answer

MOST_CONNECTIONS = 16
LIMIT = 5.0  # seconds that a connection may last

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[^]]*\]|[^:]*):)?(?P<port>[0-9]{1,5})", re.ASCII)
_HINT = "HOST:PORT, such as 127.0.0.1:8080, [::1]:8080 or 0.0.0.0:8080; HOST is an address or localhost"
_MOST_PORT = 65535


def health_address(text: str) -> tuple[str, int]:
    """Return address and port of `HOST:PORT`; without a host it is loopback."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _MOST_PORT:
        raise UsageError(f"{text[:80]!r} is no address to answer health checks at", hint=_HINT)
    host = (match["host"] or LOOPBACK).removeprefix("[").removesuffix("]")
    try:
        return (LOOPBACK if host.lower() == "localhost" else str(ipaddress.ip_address(host))), int(
            match["port"]
        )
    except ValueError:
        raise UsageError(f"{host[:80]!r} is no address to answer health checks at", hint=_HINT) from None


class HealthServer(BoundedServer):
    """Answers health checks from its own threads; port 0 takes a free one, which `server_port` says."""

    task = "answer health checks"
    most_connections = MOST_CONNECTIONS

    def __init__(self, address: str, port: int) -> None:
        self.health: Callable[[], Health] = starting
        super().__init__(address, port, HealthHandler, limit=LIMIT, hint=f"ss -ltnp 'sport = :{port}'")

    @classmethod
    @contextlib.contextmanager
    def serving(cls, text: str) -> Iterator["HealthServer"]:
        """Serve at `HOST:PORT` from a thread while the block lasts."""
        with cls(*health_address(text)) as server:
            threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
            try:
                yield server
            finally:
                server.shutdown()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return (
            f"http://[{host!s}]:{port}/"
            if self.address_family == socket.AF_INET6
            else f"http://{host!s}:{port}/"
        )


def starting() -> Health:
    """Return the answer before the follower has joined the job."""
    return False, {
        "ready": False,
        "state": "waiting",
        "since": None,
        "reason": "the follower starts",
        "version": None,
    }


class HealthHandler(QuietHandler):
    """Answers one health check, whatever its path."""

    server: HealthServer
    timeout = LIMIT

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        is_ready, document = self.server.health()
        body = f"{json.dumps(document)}\n".encode("ascii")
        self.send_response(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name
