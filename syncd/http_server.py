"""The base of small HTTP servers: few connections at a time, none of them for long, and a silent log."""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, ClassVar

from syncd.errors import ConfigError


class BoundedServer(ThreadingHTTPServer):
    """Answers from one thread a connection, a bounded number at a time.

    Args:
        port: Port; 0 takes a free one, which `server_port` says.
        limit: Seconds that a connection may last: a client that sends byte by byte is cut off too.
    """

    daemon_threads = True
    block_on_close = False

    task: ClassVar[str] = "listen"
    """What it cannot do if the address is taken, for messages."""
    most_connections: ClassVar[int]
    busy: ClassVar[bytes] = b""
    """What a connection beyond that is told before it is closed."""

    def __init__(
        self, address: str, port: int, handler: type["QuietHandler"], *, limit: float, hint: str
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.request_queue_size = (
            self.most_connections
        )  # with fewer, concurrent clients wait for a second packet
        self.limit = limit
        self._open: dict[Any, float] = {}
        self._counting = threading.Lock()
        try:
            super().__init__((address, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            refused = f"cannot {self.task} on {address}, port {port} ({reason})"
            raise ConfigError(refused, hint=hint) from error

    def server_bind(self) -> None:
        """Bind without asking a name server who this is."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment] # typed for IPv4

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread, or close the connection at once if there are too many."""
        with self._counting:
            is_full = len(self._open) >= self.most_connections
            if not is_full:
                self._open[request] = time.monotonic()
        if not is_full:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0.0)
            request.send(self.busy)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._counting:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off connections that have lasted too long; called about twice a second."""
        now = time.monotonic()
        with self._counting:
            late = [request for request, since in self._open.items() if now - since > self.limit]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or has sent no valid request."""


class QuietHandler(BaseHTTPRequestHandler):
    """Answers one request, and neither logs it nor says which software answers."""

    def version_string(self) -> str:
        return "syncd"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Log nothing: requests say nothing about the job."""
