"""Hosts that answer with nonsense, byte by byte, or never: they cost one request, and no wait without an end."""

import socket
import threading
from contextlib import closing, suppress

import pytest
from support.waiting import LONG, until

from syncd.parts.hosts import asking
from syncd.parts.hosts.asking import AskError, HostRequest, hosts_that_have

HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n"


class RawHost:
    """Listens, and answers each request with some bytes, and then with more of them for ever."""

    def __init__(self, answer, more=b""):
        self._answer, self._more, self._over = answer, more, threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                threading.Thread(target=self._give, args=self._listening.accept()[:1], daemon=True).start()

    def _give(self, connection):
        with suppress(OSError), connection:
            connection.recv(9999)
            connection.sendall(self._answer)
            while self._more and not self._over.wait(0.05):
                connection.sendall(self._more)

    def close(self):
        self._over.set()
        self._listening.close()


@pytest.fixture
def raw_host():
    hosts = []

    def begin(*answers):
        hosts.append(RawHost(*answers))
        return hosts[-1]

    yield begin
    for host in hosts:
        host.close()


class Asked:
    """A request of a million bytes in a thread."""

    def __init__(self, host):
        self.request, self.failure = HostRequest(host.address, ""), None
        self.thread = threading.Thread(target=self._get, daemon=True)
        self.thread.start()

    def _get(self):
        try:
            self.request.get("/piece", 1_000_000, lambda chunk: None)
        except AskError as error:
            self.failure = error.failure


def test_what_has_all_of_a_step_is_one_of_the_hosts_that_say_so(raw_host):
    whole = raw_host(HEAD % 15 + b'{"whole": true}')
    part = raw_host(HEAD % 16 + b'{"whole": false}')
    assert hosts_that_have([part.address, whole.address], "/have", "") == [whole.address]


@pytest.mark.parametrize("body", [b"[" * 4096, b"\xff" * 64, b"[]", b"9" * 4096])
def test_a_host_that_answers_nonsense_has_nothing(raw_host, body):
    host = raw_host(HEAD % len(body) + body)
    assert hosts_that_have([host.address], "/have", "") == []


@pytest.mark.parametrize(
    ("answer", "more"), [(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"HTTP/1.0 200 OK\r\n", b"X"), (b"", b"")]
)
def test_hosts_are_asked_what_they_have_for_a_bounded_time(raw_host, answer, more):
    late, prompt = raw_host(answer, more), raw_host(HEAD % 15 + b'{"whole": true}')
    found = []
    asked = [late.address, prompt.address]
    thread = threading.Thread(target=lambda: found.append(hosts_that_have(asked, "/", "")), daemon=True)
    thread.start()
    thread.join(LONG)
    assert found == [[prompt.address]]


@pytest.mark.parametrize(
    ("answer", "more"), [(HEAD % 1_000_000, b"x"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")]
)
def test_another_thread_ends_a_request_whose_answer_trickles(raw_host, answer, more):
    asked = Asked(raw_host(answer, more))
    until(lambda: asked.request.received or not answer)
    asked.request.end()
    asked.thread.join(LONG)
    assert not asked.thread.is_alive()
    assert asked.failure == "lost"


def test_bytes_are_taken_as_they_come(raw_host):
    asked = Asked(raw_host(HEAD % 1_000_000, b"x"))
    until(lambda: 0 < asked.request.received < 1_000_000)
    assert asked.thread.is_alive()
    asked.request.end()


def test_a_request_is_overdue_once_its_answer_does_not_begin_or_does_not_end(monkeypatch, raw_host):
    host = raw_host(HEAD % 1_000_000, b"x")
    asked = Asked(host)
    until(lambda: asked.request.received)
    assert not asked.request.is_overdue
    monkeypatch.setattr(asking, "LIMIT", 0.0)
    assert asked.request.is_overdue
    asked.request.end()
    waiting = HostRequest(host.address, "", connect=0.0, silent=0.0)
    with closing(waiting._connection):
        assert waiting.is_overdue


def test_an_error_of_this_host_is_not_blamed_on_the_other(raw_host):
    host = raw_host(HEAD % 3 + b"abc")

    def fail(chunk):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        HostRequest(host.address, "").get("/piece", 3, fail)
