"""JSON over HTTP to one server: every request has its own connection and its own deadline.

A connection that is kept open would be the one on which a server has just failed. The deadline covers connecting,
sending, and the whole answer, so a server that sends one byte a second times out like one that sends none. Redirects
are never followed: a token for one host must not be sent to another. The environment's proxies are not used.
"""

import contextlib
import copy
import http.client
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self
from urllib.parse import SplitResult, urlencode, urlsplit

from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError

MAX_ANSWER = 16 << 20
"""Bytes of the longest answer that is read; engines' lists and metrics are a thousandth of it."""

_EXCERPT = 300
_SECRET_PARTS = re.compile(r"(?<=//)[^/]*@|[?#].*", re.DOTALL)
_REDIRECT, _BAD = 300, 400
_UNAUTHORISED = frozenset({401, 403})
_MISSING = 404
_BETWEEN = frozenset({502, 504})  # what a proxy answers that did not reach the server, or lost it
_KEY_HINT = "--token-env NAME, in a job's file token_env: the environment variable with the server's key"
_MESSAGES = ("message", "detail", "error", "error_message", "object")


@dataclass(frozen=True, slots=True)
class Reply:
    request: str  # method and path, for messages
    status: int  # the HTTP status
    body: bytes
    location: str | None = None  # where a redirect leads

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def document(self) -> dict[str, Any] | None:
        document = self.json
        return document if isinstance(document, dict) else None

    @property
    def is_error(self) -> bool:
        return self.status >= _BAD

    @property
    def has_no_route(self) -> bool:
        """Return whether the server does not know the path, rather than what was asked for there."""
        return self.status == _MISSING and "error" not in (self.document or {})


class HttpClient:
    """A client of one HTTP server.

    Args:
        address: `http://HOST:PORT` or `https://HOST:PORT`, with a path in front of the server's own if need be.
        token: Sent as a bearer token with each request, never shown.
        timeout: Seconds that a load may take.
        ask_timeout: Seconds that a question may take.
        missing: The hint if the server does not know a path.
        max_answer: Bytes of the longest answer that is read.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None,
        timeout: float,
        ask_timeout: float,
        missing: str,
        max_answer: int = MAX_ANSWER,
    ) -> None:
        self._url = _checked_url(address)
        self._token = token
        self.timeout = timeout
        self._ask_timeout = min(timeout, ask_timeout)
        self._missing = missing
        self._max_answer = max_answer
        self.headers: Mapping[str, str] = {}  # headers that are sent with each request besides the usual ones

    def __repr__(self) -> str:
        return f"HttpClient({self.address})"

    @property
    def address(self) -> str:
        """Return the address, which carries no secret."""
        return self._url.geturl()

    @property
    def host(self) -> str:
        return self._url.hostname or ""

    @property
    def port(self) -> int:
        return self._url.port or (443 if self._url.scheme == "https" else 80)

    def sending(self, headers: Mapping[str, str]) -> Self:
        other = copy.copy(self)
        other.headers = {**self.headers, **headers}
        return other

    def get(self, path: str, seconds: float | None = None) -> Reply:
        """Return the answer to a GET, which by default may take as long as a question; an error status raises."""
        reply = self.get_any(path, seconds)
        if reply.has_no_route:
            raise self._no_route(reply)
        if reply.is_error:
            raise EngineUnreachableError(self.complaint(reply), hint=f"curl -i {self.address}{path}")
        return reply

    def get_any(self, path: str, seconds: float | None = None) -> Reply:
        return self._sent("GET", path, None, min(seconds or self._ask_timeout, self.timeout))

    def get_json(self, path: str, seconds: float | None = None) -> dict[str, Any]:
        reply = self.get(path, seconds)
        if reply.document is None:
            raise EngineUnreachableError(
                f"{reply.request} is answered with something else than a JSON object: {self._excerpt(reply)}",
                path=self.address,
                hint="is another program behind this address?",
            )
        return reply.document

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, hint: str, **query: str | bool
    ) -> dict[str, Any]:
        """Send a POST; return the JSON object that answers it, an empty one if the answer is none."""
        words = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in query.items()
        }
        reply = self.post_any(f"{path}?{urlencode(words)}" if query else path, body)
        if reply.is_error:
            raise LoadFailedError(self.complaint(reply), path=self.address, hint=hint)
        return reply.document or {}

    def post_any(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        reply = self.post_raw(path, body)
        if reply.has_no_route:
            raise self._no_route(reply)
        return reply

    def post_raw(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> Reply:
        """Send a POST; return any answer, an unknown path's too; it may take `seconds`, at most as long as a load."""
        return self._sent("POST", path, body or {}, min(seconds or self.timeout, self.timeout))

    def complaint(self, reply: Reply) -> str:
        return f"{reply.request} failed with {reply.status}: {self._excerpt(reply)}"

    def _check_configured(self, reply: Reply) -> None:
        where = f"{self.address} answers {reply.request} with {reply.status}"
        if reply.status in _UNAUTHORISED:
            why = "it refuses the token" if self._token else "it asks for a key, and none was given"
            raise ConfigError(f"{where}: {why}", hint=_KEY_HINT)
        if _REDIRECT <= reply.status < _BAD:
            raise ConfigError(
                f"{where}: a redirect to {self._plain(reply.location or 'nowhere')}",
                hint="redirects are not followed",
            )

    def _no_route(self, reply: Reply) -> ConfigError:
        return ConfigError(f"{self.address} has no {reply.request}", hint=self._missing)

    def _excerpt(self, reply: Reply) -> str:
        """Return what a person needs of a body: one printable line, without the token."""
        return self._plain(_message(reply.document) or reply.body[: 4 * _EXCERPT].decode("utf-8", "replace"))

    def _plain(self, text: str) -> str:
        if self._token:
            text = text.replace(self._token, "***")
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return (line[:_EXCERPT] + "...") if len(line) > _EXCERPT else line or "(empty answer)"

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Reply:
        request = f"{method} {path}"
        connection = self._connection(timeout)
        late = threading.Event()
        with contextlib.closing(connection):
            try:
                connection.connect()
                with _deadline(connection.sock, timeout, late):
                    reply = self._exchanged(connection, request, body)
            except (OSError, http.client.HTTPException) as error:
                # What is raised depends on which call the deadline interrupted.
                if late.is_set() or isinstance(error, TimeoutError):
                    self._unreachable(f"{request} was not answered within {timeout:g} s", error)
                self._unreachable(f"{request} was not answered: {self._plain(_reason(error))}", error)
        if late.is_set():
            # A body that ends with the connection looks whole when the deadline has ended it.
            self._unreachable(f"{request} was not answered within {timeout:g} s", None)
        self._check_configured(reply)
        if reply.status in _BETWEEN:
            self._unreachable(self.complaint(reply), None)
        return reply

    def _unreachable(self, message: str, error: Exception | None) -> NoReturn:
        hint = f"curl -i {self.address}/health"
        raise EngineUnreachableError(message, path=self.address, hint=hint) from error

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        is_secure = self._url.scheme == "https"  # then the default context checks certificate and name
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        # Without a port it would look for one in an IPv6 address.
        return kind(self.host, self.port, timeout=timeout)

    def _exchanged(
        self, connection: http.client.HTTPConnection, request: str, body: Mapping[str, Any] | None
    ) -> Reply:
        method, path = request.split(" ", 1)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, f"{self._url.path}{path}", data, self._headers(data or b""))
        with contextlib.closing(connection.getresponse()) as response:
            whole = _whole(response, self._max_answer)
            return Reply(request, response.status, whole, response.getheader("Location"))

    def _headers(self, data: bytes) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json", "Connection": "close"}
        return {**headers, **self._authorization(data), **self.headers}

    def _authorization(self, data: bytes) -> dict[str, str]:
        """Return the headers that show who sends a body."""
        del data
        if not self._token:
            return {}
        if not (self._token.isascii() and self._token.isprintable()):
            # What http.client says of it repeats the token.
            problem = "the token has a line feed, or another character that no header can have"
            raise ConfigError(problem, path=self.address, hint="a token is one line of ASCII")
        return {"Authorization": f"Bearer {self._token}"}


@contextlib.contextmanager
def _deadline(connected: socket.socket, seconds: float, late: threading.Event) -> Iterator[None]:
    """Shut a connection down when its time is over; a socket's own time-out is for each receive only."""

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _whole(response: http.client.HTTPResponse, longest: int) -> bytes:
    whole = response.read(longest + 1)
    if len(whole) > longest:
        raise http.client.HTTPException(f"the answer is longer than {longest} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return whole


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _message(document: dict[str, Any] | None) -> str | None:
    """Return the sentence in an error's document: engines put it under different names."""
    for key in _MESSAGES:
        message = (document or {}).get(key)
        if isinstance(message, dict):
            return _message(message)
        if isinstance(message, str) and message:
            return message
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"


def _checked_url(address: str) -> SplitResult:
    try:
        url = urlsplit(address.rstrip("/"))
        port, _ = url.port, (url.hostname or "").encode("idna")
    except ValueError:
        raise ConfigError(f"{_public(address)!r} is not an address", hint="http://127.0.0.1:8000") from None
    if url.username is not None or url.password is not None:
        raise ConfigError("an address must not carry a secret", hint="give the token by --token-file")
    is_sendable = address.isprintable() and " " not in address and url.path.isascii()
    is_server = url.scheme in {"http", "https"} and url.hostname and port != 0
    if not is_server or not is_sendable or url.query or url.fragment:
        raise ConfigError(
            f"{_public(address)!r} is not the address of a server", hint="http://127.0.0.1:8000"
        )
    return url


def _public(address: str) -> str:
    """Return an address that may be wrong without what may be a secret in it: user, password, query, fragment."""
    return _SECRET_PARTS.sub("", address)
