"""Asks one other host for one piece; every wait is bounded, and another thread may end it."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus

from syncd.parts.hosts.blame import Failure
from syncd.parts.hosts.server import LIMIT, TOKEN_HEADER, WAIT
from syncd.parts.hosts.threads import start_thread

CONNECT = 5.0
SILENT = WAIT + 5.0  # seconds without a byte after which a host is late

_HAVE = 1.0
_CHUNK = 256 << 10

_FAILURES: dict[int, Failure] = {
    HTTPStatus.FORBIDDEN: "denied",
    HTTPStatus.NOT_FOUND: "absent",
    HTTPStatus.SERVICE_UNAVAILABLE: "busy",
}


class AskError(Exception):
    """Why another host did not give what it was asked for."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure: Failure = failure


class HostRequest:
    """One request to one host.

    Args:
        host: `HOST:PORT`.
        token: The job's.
    """

    def __init__(self, host: str, token: str, connect: float = CONNECT, silent: float = SILENT) -> None:
        name, _, port = host.rpartition(":")
        self._connection = http.client.HTTPConnection(name.strip("[]"), int(port), timeout=connect)
        self._token, self._silent, self._begin_in = token, silent, connect + silent
        self._begun = time.monotonic()
        self._socket: socket.socket | None = (
            None  # kept, since `http.client` gives it up with the answer's head
        )
        self.received = 0
        self.is_ended = False

    @property
    def is_overdue(self) -> bool:
        """Return whether it lasts longer than that of an honest host, whatever comes meanwhile."""
        return time.monotonic() - self._begun > (LIMIT if self.received else self._begin_in)

    def get(self, path: str, length: int, take: Callable[[memoryview], None]) -> None:
        """Take the bytes of a piece in chunks."""
        with contextlib.closing(self._connection), contextlib.closing(self._open(path)) as answer:
            if answer.length != length:
                raise AskError("wrong")
            while self.received < length:
                chunk = self._read(answer)
                if not chunk:
                    raise AskError("lost")
                self.received += len(chunk)
                take(memoryview(chunk))

    def is_whole(self, path: str) -> bool:
        """Return whether the host has all of a step."""
        with contextlib.closing(self._connection), contextlib.closing(self._open(path)) as answer, _blamed():
            document = json.loads(answer.read(4096))
            return isinstance(document, dict) and document.get("whole") is True

    def end(self) -> None:
        """End the request; any thread may call it."""
        self.is_ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _open(self, path: str) -> http.client.HTTPResponse:
        with _blamed():
            self._connection.connect()
            self._socket = self._connection.sock
            if self.is_ended:
                raise AskError("lost")
            self._socket.settimeout(self._silent)
            self._connection.request("GET", path, headers={TOKEN_HEADER: self._token, "Connection": "close"})
            answer = self._connection.getresponse()
        if answer.status == HTTPStatus.OK:
            return answer
        answer.close()
        raise AskError(_FAILURES.get(answer.status, "wrong"))

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        """Return what has come; waiting for more of it would hide how slowly it comes."""
        with _blamed():
            return answer.read1(_CHUNK)


@contextlib.contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except AskError:
        raise
    except TimeoutError:
        raise AskError("late") from None
    except ConnectionRefusedError:
        raise AskError("refused") from None
    except (OSError, http.client.HTTPException):
        raise AskError("lost") from None
    except Exception:  # noqa: BLE001 - whatever an answer brings about, as brackets without an end in JSON
        raise AskError("wrong") from None


def hosts_that_have(hosts: Sequence[str], path: str, token: str) -> list[str]:
    """Return the hosts that have all of a step, of a few that are asked at once, within a second."""
    requests = {host: HostRequest(host, token, _HAVE, _HAVE) for host in hosts}
    have = set[str]()

    def ask(host: str) -> None:
        with contextlib.suppress(AskError):
            if requests[host].is_whole(path):
                have.add(host)

    until = time.monotonic() + _HAVE
    for thread in [start_thread(partial(ask, host), "have") for host in hosts]:
        thread.join(max(until - time.monotonic(), 0.0))
    for request in requests.values():
        request.end()
    return [host for host in hosts if host in have]
