"""`syncd serve` as a process, and requests to it written byte by byte."""

import contextlib
import http.client
import json
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from subprocess import Popen
from typing import Any
from urllib.parse import urlsplit

from support.cli import spawn

TIMEOUT = 60.0


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass(frozen=True)
class Page:
    """A page that is being served."""

    url: str
    process: Popen[str]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def get(self, path: str = "/data.json", method: str = "GET", **headers: str) -> Reply:
        """Ask once."""
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())

    def raw(self, *pieces: bytes) -> bytes:
        """Send bytes and return all that comes back."""
        with socket.create_connection(self.address, TIMEOUT) as connection:
            for piece in pieces:
                connection.sendall(piece)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@contextlib.contextmanager
def served(*args: object) -> Iterator[Page]:
    """Serve a page on a free port of this host."""
    with spawn("serve", *args, "--port", "0") as process:
        assert process.stdout is not None
        try:
            says, _, _ = select.select([process.stdout], [], [], TIMEOUT)
            url = process.stdout.readline().strip() if says else ""
            if not url:
                process.kill()
                _, err = process.communicate(timeout=TIMEOUT)
                raise AssertionError(f"no page within {TIMEOUT:g} s: {err}")
            yield Page(url, process)
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=TIMEOUT)
