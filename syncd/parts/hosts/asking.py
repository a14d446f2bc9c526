"""Asks one other host for one piece; every wait is bounded, and another thread may end it."""

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus

from syncd.parts.hosts.blame import Failure
from syncd.parts.hosts.server import TOKEN_HEADER, WAIT

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
        self._token, self._silent = token, silent
        self.received = 0
        self.is_ended = False

    def get(self, path: str, length: int, take: Callable[[memoryview], None]) -> None:
        """Take the bytes of a piece in chunks."""
        with self._answered(path) as answer:
            if answer.length != length:
                raise AskError("wrong")
            memory = memoryview(bytearray(min(_CHUNK, length)))
            while self.received < length:
                count = answer.readinto(memory[: length - self.received])
                if not count:
                    raise AskError("lost")
                self.received += count
                take(memory[:count])

    def is_whole(self, path: str) -> bool:
        """Return whether the host has all of a step."""
        with self._answered(path) as answer:
            document = json.loads(answer.read(4096))
            return isinstance(document, dict) and document.get("whole") is True

    def end(self) -> None:
        """End the request; any thread may call it."""
        self.is_ended = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _answered(self, path: str) -> Iterator[http.client.HTTPResponse]:
        headers = {TOKEN_HEADER: self._token, "Connection": "close"}
        try:
            self._connection.connect()
            if self.is_ended:
                raise AskError("lost")
            self._connection.sock.settimeout(self._silent)
            self._connection.request("GET", path, headers=headers)
            answer = self._connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise AskError(_FAILURES.get(answer.status, "wrong"))
            yield answer
        except TimeoutError:
            raise AskError("late") from None
        except ConnectionRefusedError:
            raise AskError("refused") from None
        except (OSError, http.client.HTTPException, ValueError):
            raise AskError("lost") from None
        finally:
            self._connection.close()


def hosts_that_have(hosts: list[str], path: str, token: str) -> list[str]:
    """Return the hosts that have all of a step, of a few that are asked at once, within a second."""
    import concurrent.futures  # noqa: PLC0415 - not needed to serve

    def ask(host: str) -> bool:
        with contextlib.suppress(AskError):
            return HostRequest(host, token, _HAVE, _HAVE).is_whole(path)
        return False

    if not hosts:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(hosts), thread_name_prefix="have") as pool:
        return [host for host, has in zip(hosts, pool.map(ask, hosts), strict=True) if has]
