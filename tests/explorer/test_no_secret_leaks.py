"""A token is in nothing that is written: not in logs, outcomes, status, events, errors, or any file of the job."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from support.cli import command, environment
from support.jobs import write_step

from explorer_hooks.finding import shown
from explorer_hooks.http_client import HttpClient
from syncd.errors import SyncdError
from syncd.protocol.layout import Job

SECRET = "tok-5ae1f0c7d2b94e"

ANSWERS = (
    "HTTP/1.1 500 Oops\r\nContent-Length: {size}\r\n\r\n{body}",
    "HTTP/1.1 302 Found\r\nLocation: http://elsewhere/?{body}\r\nContent-Length: 0\r\n\r\n",
    "{body}\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n{body}",
    "HTTP/1.1 401 {body}\r\nContent-Length: {size}\r\n\r\n{body}",
    "HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n{body}",
)
"""Answers of a server that says back whatever it was sent."""


class Echo:
    """A server that answers each request with what it was sent, in one of many forms."""

    def __init__(self, answer):
        self._answer, self.heard = answer, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(10)
                    asked = connection.recv(65536)
                    self.heard += asked
                    body = " ".join(asked.decode("ascii", "replace").split())
                    said = self._answer.format(body=body, size=len(body))
                    connection.sendall(said.encode())


@pytest.fixture
def echo():
    made = []

    def make(answer):
        made.append(Echo(answer))
        return made[-1]

    yield make
    for server in made:
        server.close()


WAYS = ("environment", "file", "credential")


def given(way, place):
    """Return the options and the environment that hand the token over."""
    place.mkdir()
    (place / "hook-token").write_text(f"{SECRET}\n")
    if way == "environment":
        return ["--token-env", "ENGINE_KEY"], {"ENGINE_KEY": SECRET}
    if way == "file":
        return ["--token-file", str(place / "hook-token")], {}
    return [], {"CREDENTIALS_DIRECTORY": str(place)}


def ran(words, more):
    """Run a command line and return what became of it."""
    done = command(*words)
    return subprocess.run(
        done, check=False, capture_output=True, text=True, timeout=60, env=environment(**more)
    )


def tells(place):
    """Return the files below a place that hold the token, in their content or their name."""
    found = []
    for parent, directories, files in os.walk(place):
        found += [name for name in (*directories, *files) if SECRET in name]
        found += [name for name in files if SECRET.encode() in Path(parent, name).read_bytes()]
    return found


@pytest.mark.parametrize(
    ("way", "hook"), [*itertools.product(WAYS, ["vllm"]), ("file", "sglang"), ("file", "webhook")]
)
def test_a_token_is_sent_and_appears_in_no_output_or_file(tmp_path, echo, way, hook):
    job = Job.at(str(tmp_path / "job"))
    os.mkdir(job.root)
    write_step(job, 1)
    server = echo(ANSWERS[0])
    options, more = given(way, tmp_path / "secrets")
    ran(["watch", job.root, "--once"], {})
    done = ran(
        [
            *("--debug", "follow", job.root, "--hook", f"{hook}={server.address}", "--name", "e0", "--once"),
            *("--wait", 0.3, "--retries", 0, "--timeout", 5, "--log-level", "debug", "--json", *options),
            *("--stage", tmp_path / "stage", "--ready-file", tmp_path / "ready"),
        ],
        more,
    )
    status = ran(["status", job.root, "--json"], {})
    # A webhook signs with it; the others send it.
    assert hook == "webhook" or SECRET.encode() in server.heard
    assert done.returncode != 0
    assert done.stderr
    assert json.loads(status.stdout)["explorers"][0]["id"] == "e0"
    assert SECRET not in done.stdout + done.stderr + status.stdout + status.stderr
    (tmp_path / "secrets" / "hook-token").unlink()
    assert not tells(tmp_path)


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_token_echoed_by_the_server_is_not_in_error_messages(echo, answer):
    server = echo(answer)
    client = HttpClient(server.address, token=SECRET, timeout=30, ask_timeout=30, missing="")
    for ask in (client.get_json, client.get, lambda path: client.post(path, {}, hint="x")):
        with contextlib.suppress(SyncdError):
            said = ask("/v1")
            assert said is not None
            continue
        with pytest.raises(SyncdError) as raised:
            ask("/v1")
        assert SECRET not in f"{raised.value} {raised.value.hint} {client!r}"
    assert SECRET.encode() in server.heard


ADDRESSES = (
    f"http://user:{SECRET}@host:8000",
    f"http://user:{SECRET}@host:port",
    f"http://host:8000/?key={SECRET}",
    f"ftp://{SECRET}@host/#{SECRET}",
    f"http://host:99999/?key={SECRET}",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_secret_in_an_address_is_refused_without_showing_it(address):
    with pytest.raises(SyncdError) as raised:
        HttpClient(address, token=None, timeout=1, ask_timeout=1, missing="")
    assert SECRET not in f"{raised.value} {raised.value.hint}"
    assert SECRET not in shown(f"vllm={address}")
