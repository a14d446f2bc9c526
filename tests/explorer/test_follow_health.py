"""Whether an engine is ready, as load balancers ask: `syncd follow --health`, and the heartbeat in the ready file."""

import json
import os
import socket
import time
import urllib.error
import urllib.request

import pytest
from support.documents import checked
from support.followers import Scene
from support.jobs import ManualClock

from explorer_hooks.follower import health, reporter
from explorer_hooks.follower.health import HealthServer, health_address
from explorer_hooks.follower.reporter import Readiness
from syncd.errors import ConfigError, UsageError
from syncd.protocol.presence import HEARTBEAT

LONG = 60.0


def ask(url, method="GET"):
    """Return the status of an answer and its document; the proxy of the environment is not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer = opener.open(urllib.request.Request(url, method=method), timeout=LONG)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(body) if body else None


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


@pytest.fixture
def server():
    with HealthServer.serving("127.0.0.1:0") as made:
        yield made


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("localhost:9", ("127.0.0.1", 9)),
        (":8080", ("127.0.0.1", 8080)),
        ("8080", ("127.0.0.1", 8080)),
    ],
)
def test_an_address_without_a_host_is_loopback(text, found):
    assert health_address(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "127.0.0.1:\u0661"),
        *("::1:80", "example.org:80", "1.2.3:80", "a:b:1", "http://127.0.0.1:80", "[]:80"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="no address to answer health checks at") as caught:
        health_address(text)
    assert "HOST:PORT" in caught.value.hint


def test_a_port_in_use_is_refused_with_its_address(server):
    port = server.server_port
    with pytest.raises(ConfigError, match=f"health checks on 127.0.0.1, port {port}"):
        HealthServer("127.0.0.1", port)


def test_the_answer_is_200_only_while_the_engine_is_ready(scene, server):
    status, document = ask(server.url)
    assert (status, checked("health", document)["since"]) == (503, None)
    follower = scene.follow(max_lag=1)
    server.health = follower.health
    status, document = ask(server.url)
    assert (status, document["state"], document["version"]) == (503, "waiting", None)
    scene.publish(1)
    assert follower.turn(timeout=LONG).kind == "applied"
    status, document = ask(f"{server.url}any/path?q")
    checked("health", document)
    assert (status, document["state"], document["version"], document["reason"]) == (200, "loaded", "1.1", "")
    assert abs(document["since"] - time.time()) < LONG
    assert ask(server.url, "HEAD") == (200, None)
    scene.engine.is_gone = True
    assert follower.turn(timeout=0.2).kind == "unreachable"
    status, document = ask(server.url)
    assert (status, document["ready"], document["state"]) == (503, False, "unreachable")
    assert document["reason"]


def test_an_engine_that_is_too_far_behind_is_not_ready(scene):
    follower = scene.follow(max_lag=1, retries=0)
    scene.publish(1)
    assert follower.turn(timeout=LONG).kind == "applied"
    scene.engine.fails["prepare"] = 9
    for step, is_ready in ((2, True), (3, False)):
        scene.publish(step)
        assert follower.turn(timeout=LONG).kind == "refused"
        found, document = follower.health()
        assert (found, document["state"]) == (is_ready, "refused")


def test_an_engine_is_not_ready_while_it_loads(scene, tmp_path):
    ready = tmp_path / "ready"
    follower = scene.follow(ready_file=str(ready))
    scene.publish(1)
    assert follower.turn(timeout=LONG).kind == "applied"
    seen = []
    scene.engine.doing["prepare"] = lambda: seen.append((follower.health()[0], ready.exists()))
    scene.engine.doing["load"] = lambda: seen.append((follower.health()[0], ready.exists()))
    scene.publish(2)
    assert follower.turn(timeout=LONG).kind == "applied"
    assert seen == [(True, True), (False, False)]
    assert follower.health()[0]
    assert ready.read_text().startswith("1.2 ")


def test_a_follower_that_has_long_not_reported_is_not_ready(scene, monkeypatch):
    follower = scene.follow()
    scene.publish(1)
    assert follower.turn(timeout=LONG).kind == "applied"
    assert follower.health()[0]
    monkeypatch.setattr(reporter, "SILENT", 0.05)
    time.sleep(0.1)
    is_ready, document = follower.health()
    assert (is_ready, document["state"], document["version"]) == (False, "loaded", "1.1")
    assert "has not reported" in document["reason"]
    follower.turn(timeout=0.01)
    assert follower.health()[0]


def test_more_connections_than_a_few_and_slow_ones_are_cut_off(server):
    server.limit = 0.2
    held = [
        socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(health.MOST_CONNECTIONS)
    ]
    for one in held:
        one.settimeout(LONG)
        one.sendall(b"GET / HTTP/1.1\r\n")
    assert all(one.recv(1) == b"" for one in held)  # never whole, and closed
    for one in held:
        one.close()
    assert ask(server.url)[0] == 503


def test_the_ready_file_carries_the_time_of_the_last_heartbeat(tmp_path):
    path, clock = tmp_path / "ready", ManualClock()
    ready = Readiness(str(path), clock)
    ready.show("1.1")
    written = clock.time()
    assert path.read_text() == f"1.1 {written:.0f}\n"
    clock.at += HEARTBEAT - 1
    ready.show("1.1")
    ready.beat()
    assert path.read_text() == f"1.1 {written:.0f}\n"
    clock.at += 1
    ready.beat()
    assert path.read_text() == f"1.1 {clock.time():.0f}\n"
    clock.at += HEARTBEAT
    ready.show("1.1")
    assert path.read_text() == f"1.1 {clock.time():.0f}\n"
    ready.show("1.2")
    assert path.read_text() == f"1.2 {clock.time():.0f}\n"
    ready.show(None)
    ready.beat()
    assert not path.exists()
    assert os.listdir(tmp_path) == []


def test_a_heartbeat_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "place").mkdir()
    path, clock = tmp_path / "place" / "ready", ManualClock()
    ready = Readiness(str(path), clock)
    problems = []
    ready.problem = problems.append
    ready.show("1.1")
    path.unlink()
    path.parent.rmdir()
    clock.at += HEARTBEAT
    ready.beat()
    ready.show("1.1")
    ready.show("1.2")
    assert ready.silent_for() == 0.0
    assert [type(problem) for problem in problems] == [FileNotFoundError], "it is reported once"


def test_the_heartbeat_continues_while_files_are_read(scene, tmp_path, monkeypatch):
    """A version is read for longer than a heartbeat: the engine works on, and the ready file says so."""
    monkeypatch.setattr(reporter, "HEARTBEAT", 0.0)
    ready = tmp_path / "ready"
    follower = scene.follow(ready_file=str(ready), stage=str(tmp_path / "stage"))
    scene.publish(1)
    assert follower.turn(timeout=LONG).kind == "applied"
    scene.publish(2)
    written = []
    write = Readiness._write

    def note(self, label):
        written.append((label, scene.presence().loading))
        write(self, label)

    monkeypatch.setattr(Readiness, "_write", note)
    assert follower.turn(timeout=LONG).kind == "applied"
    assert ("1.1", (1, 2)) in written
