"""The endpoint for load balancers: a request is answered with 200 while the engine is ready, and else with 503."""

import contextlib
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from syncd.errors import ConfigError, UsageError

Health = tuple[bool, dict[str, Any]]
"""Whether the engine is ready, and the fields of the answer."""

MOST_CONNECTIONS = 16
LIMIT = 5.0
"""Seconds that a connection may last: a client that sends byte by byte is cut off too."""

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[^]]*\]|[^:]*):)?(?P<port>[0-9]{1,5})", re.ASCII)
_HINT = "HOST:PORT, such as 127.0.0.1:8080, [::1]:8080 or 0.0.0.0:8080; HOST is an address or localhost"
_MOST_PORT = 65535


def health_address(text: str) -> tuple[str, int]:
    """Return address and port of `HOST:PORT`; without a host it is loopback.

    Raises:
        UsageError: The text is none.
    """
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


class HealthServer(ThreadingHTTPServer):
    """Answers health checks from its own threads, a bounded number at a time.

    Args:
        address: IPv4 or IPv6 address to listen at.
        port: Port; 0 takes a free one, which `server_port` says.

    Raises:
        ConfigError: It cannot listen on the address.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.health: Callable[[], Health] = starting
        self._open: dict[Any, float] = {}
        self._counting = threading.Lock()
        try:
            super().__init__((address, port), HealthHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            refused = f"cannot answer health checks on {address}, port {port} ({reason})"
            raise ConfigError(refused, hint=f"ss -ltnp 'sport = :{port}'") from error

    @classmethod
    @contextlib.contextmanager
    def serving(cls, text: str) -> Iterator["HealthServer"]:
        """Serve at `HOST:PORT` from a thread while the block lasts.

        Raises:
            UsageError: The text is no address.
            ConfigError: It cannot listen on the address.
        """
        with cls(*health_address(text)) as server:
            threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
            try:
                yield server
            finally:
                server.shutdown()

    @property
    def url(self) -> str:
        """Return where it answers."""
        host, port = self.server_address[:2]
        return (
            f"http://[{host!s}]:{port}/"
            if self.address_family == socket.AF_INET6
            else f"http://{host!s}:{port}/"
        )

    def server_bind(self) -> None:
        """Bind without asking a name server who this is."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment] # typed for IPv4

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread, or close the connection at once if there are too many."""
        with self._counting:
            is_full = len(self._open) >= MOST_CONNECTIONS
            if not is_full:
                self._open[request] = time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and forget it."""
        with self._counting:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off connections that have lasted too long; called about twice a second."""
        now = time.monotonic()
        with self._counting:
            late = [request for request, since in self._open.items() if now - since > LIMIT]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or has sent no valid request."""


def starting() -> Health:
    """Return the answer before the follower has joined the job."""
    return False, {
        "ready": False,
        "state": "waiting",
        "since": None,
        "reason": "the follower starts",
        "version": None,
    }


class HealthHandler(BaseHTTPRequestHandler):
    """Answers one health check, whatever its path."""

    server: HealthServer
    timeout = LIMIT

    def do_GET(self) -> None:
        """Answer 200 if the engine is ready, else 503; the body says why as JSON."""
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

    def version_string(self) -> str:
        """Return what the answer calls its server."""
        return "syncd"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Log nothing."""
