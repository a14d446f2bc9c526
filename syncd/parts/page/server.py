"""The HTTP server of the page: its files and its data, for a few viewers, by GET and HEAD only.

A web page of a stranger can point a name of its own at 127.0.0.1 and so read what listens there (DNS rebinding). Its
requests carry that name in `Host`: the server refuses what is neither an address nor a name known here, and looks up
no name.
"""

import ipaddress
import re
import threading
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from urllib.parse import parse_qsl

from syncd.errors import UsageError
from syncd.http_server import BoundedServer, QuietHandler
from syncd.parts.page.site import Site

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every answer: the page loads only these files, and no other page can read them."""

MOST_CONNECTIONS = 32
IDLE_LIMIT = 10.0  # seconds that a connection may be idle
LIMIT = 20.0  # seconds that a connection may last

_LOCALHOST = "localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_METHODS = ("GET", "HEAD")
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
)


class PageServer(BoundedServer):
    """Answers a few viewers, each connection for `limit` seconds at most.

    Port 0 takes a free one, which `server_port` says. It answers to `names`, in lower case, besides localhost.
    """

    most_connections = MOST_CONNECTIONS
    busy = _BUSY

    def __init__(
        self, address: str, port: int, site: Site, names: Collection[str] = (), limit: float = LIMIT
    ) -> None:
        self.site, self.names, self.loopback = site, frozenset(names), is_loopback(address)
        super().__init__(address, port, PageHandler, limit=limit, hint="another --port, or 0 for a free one")


class PageHandler(QuietHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_LIMIT

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        path, _, query = self.path.partition("?")
        try:
            content = self.server.site.at(path, dict(parse_qsl(query)))
        except Exception:  # noqa: BLE001 - whatever it is, who asks is told that the server still lives
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, content.type, content.body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def parse_request(self) -> bool:
        """Refuse what must not be answered, before anything else reads it."""
        if not super().parse_request():
            return False
        wrong = self._why_not()
        if wrong is not None:
            self.send_error(wrong)
        return wrong is None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer with a status and its name: nothing that a request says is ever repeated."""
        status = HTTPStatus(code)
        self._answer(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())

    def _why_not(self) -> HTTPStatus | None:
        if self.command not in _METHODS:
            return HTTPStatus.METHOD_NOT_ALLOWED
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1:
            return HTTPStatus.BAD_REQUEST
        if not may_ask(hosts[0], loopback=self.server.loopback, names=self.server.names):
            return HTTPStatus.MISDIRECTED_REQUEST
        return None

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Connection", "close")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(_METHODS))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if getattr(self, "command", None) != "HEAD":
            self.wfile.write(body)


def serve_in_background(server: PageServer) -> Callable[[], None]:
    threading.Thread(target=server.serve_forever, name="serve", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


def address_of(host: str) -> str:
    if host.lower() == _LOCALHOST:
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        hint = "127.0.0.1, ::1, or with --expose 0.0.0.0 or an address that `ip -brief address` shows"
        raise UsageError(f"{host!r} is no address to listen at", hint=hint) from None


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def may_ask(header: str | None, *, loopback: bool, names: Collection[str]) -> bool:
    """Return whether a request with this `Host` is answered.

    `loopback`: only this host reaches the page's address. `names`, lower case, may be asked for besides `localhost`.
    """
    match = _HOST.fullmatch(header or "")
    if match is None:
        return False
    name = match[1].lower().strip("[]").removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == _LOCALHOST or name in names
    # Nobody can point an address elsewhere; but on loopback nobody else's is meant.
    return is_loopback(name) or not loopback or name in names


def url(address: str, port: int, hostname: str) -> str:
    """Return where the page is, by the host's name where it listens at all addresses."""
    if ipaddress.ip_address(address).is_unspecified:
        address = hostname
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
