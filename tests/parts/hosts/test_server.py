"""What the server of a host gives, to whom, and what it never gives."""

import errno
import http.client
import socket

import pytest

from syncd.parts.hosts.asking import AskError, HostRequest
from syncd.parts.hosts.members import read_token
from syncd.parts.hosts.server import TOKEN_HEADER, PieceServer
from syncd.parts.hosts.shelf import key_of


@pytest.fixture
def host(fleet):
    fleet.whole(1)
    (host,) = fleet.add(1)
    fleet.list()
    host.fetch()
    return host


def ask(host, path, token=None):
    name, _, port = host.reader.address.rpartition(":")
    connection = http.client.HTTPConnection(name, int(port), timeout=5)
    connection.request(
        "GET", path, headers={TOKEN_HEADER: read_token(host.client.job) if token is None else token}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()


def key(host):
    return key_of(host.client.latest_version().digest)


def test_it_gives_bytes_of_a_copy_by_the_number_of_the_file(host, fleet):
    status, data = ask(host, f"/piece/copy/{key(host)}/0/0/2/3")
    first = min((fleet.place / "export1").iterdir())
    assert (status, data) == (200, first.read_bytes()[2:5])


@pytest.mark.parametrize("token", ["", "0" * 64, "\xe9"])
def test_without_the_jobs_token_it_gives_nothing(host, token):
    assert ask(host, f"/piece/copy/{key(host)}/0/0/0/3", token) == (403, b"")
    assert ask(host, f"/have/copy/{key(host)}", token) == (403, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/piece/copy/../../etc/passwd/0/0/0/1",
        "/piece/copy/{key}/0/99/0/1",
        "/piece/copy/{key}/0/0/0/99999999999",
        "/piece/copy/{key}/0/0/0/0",
        "/piece/copy/0000000000000000/0/0/0/1",
        "/piece/containers/{key}/0/0/0/1",
        "/have/copy/0000000000000000",
        "//etc/passwd",
    ],
)
def test_what_is_no_piece_of_a_copy_is_not_found(host, path):
    assert ask(host, path.format(key=key(host)))[0] == 404


def test_whether_a_host_has_all_of_a_step_is_one_small_answer(host):
    assert ask(host, f"/have/copy/{key(host)}") == (200, b'{"whole": true}')


def test_what_is_no_request_ends_with_its_connection(host):
    name, _, port = host.reader.address.rpartition(":")
    with socket.create_connection((name, int(port)), 5) as connection:
        connection.sendall(b"\0" * 100 + b"\r\n\r\n")
        assert b"200" not in connection.recv(4096)


def test_a_job_without_a_token_gives_nothing(host):
    host.reader._tokens._read = lambda: None
    host.reader._tokens._until = 0.0
    assert ask(host, f"/have/copy/{key(host)}")[0] == 403


def test_a_token_that_cannot_be_read_for_a_while_is_taken_meanwhile(host):
    def fail():
        raise OSError(errno.EIO, "Input/output error")

    host.reader._tokens._read = fail
    host.reader._tokens._until = 0.0
    assert ask(host, f"/have/copy/{key(host)}")[0] == 200


def test_a_request_beyond_those_it_answers_at_once_is_told_to_come_again(host, monkeypatch):
    monkeypatch.setattr(PieceServer, "most_connections", 0)
    assert ask(host, f"/have/copy/{key(host)}") == (503, b"")
    with pytest.raises(AskError) as error:
        HostRequest(host.reader.address, read_token(host.client.job)).is_whole(f"/have/copy/{key(host)}")
    assert error.value.failure == "busy"
