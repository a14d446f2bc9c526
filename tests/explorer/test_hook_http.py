"""The HTTP client of hooks against servers that misbehave: every call ends, with an error that says what to do."""

import contextlib
import socket
import threading
import time

import pytest
from support.fake_servers import Answer, FakeServer
from support.hook_contract import IMPATIENCE, PATIENCE, bounded, shown

from explorer_hooks.http_client import HttpClient
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError

TOKEN = "a-secret-of-the-server"
MISSING = "start it with the flag"


def server(address, timeout=PATIENCE, token=TOKEN):
    options = {"timeout": timeout, "ask_timeout": timeout, "missing": MISSING, "max_answer": 1 << 20}
    return HttpClient(address, token=token, **options)


@contextlib.contextmanager
def raw(behave):
    """Listen, and do with each connection what a function does with it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                handlers.append(threading.Thread(target=handled, args=(connection,), daemon=True))
                handlers[-1].start()

    def handled(connection):
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(5)
            connection.recv(65536)
            behave(connection, stop)

    thread = threading.Thread(target=serve, daemon=True)
    handlers = []
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        for one in (thread, *handlers):
            one.join(10)
        listener.close()


@pytest.fixture
def fake():
    fake = FakeServer(TOKEN)
    yield fake
    fake.stop()


def drips(start):
    """Send some bytes, then one more whenever a socket's own time-out would be near."""

    def behave(connection, stop):
        connection.sendall(start)
        while not stop.wait(0.1):
            connection.sendall(b"x")

    return behave


def floods(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    piece = b"[" * 65536
    while not stop.is_set():
        connection.sendall(piece)


def silent(connection, stop):
    stop.wait(10)


def says(text):
    return lambda connection, stop: connection.sendall(text)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        pytest.param(floods, "longer than", id="a body of any size"),
        pytest.param(says(b"SSH-2.0-OpenSSH_9.6\r\n"), "was not answered", id="another protocol"),
        pytest.param(says(b""), "was not answered", id="closes"),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"), "IncompleteRead", id="a short body"
        ),
        pytest.param(says(b"HTTP/1.1 200 OK\r\n\r\n[1, 2]"), "JSON object: \\[1, 2\\]", id="no object"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\n\r\n\xff\x00<html>"), "JSON object", id="no JSON"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000), "JSON object", id="deep JSON"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\n\r\n"), "empty answer", id="no body"),
    ],
)
def test_a_malformed_response_is_an_unreachable_engine(behave, message):
    assert_unreachable(behave, message, PATIENCE)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        pytest.param(silent, "within 1 s", id="says nothing"),
        pytest.param(drips(b""), "was not answered", id="a status line without an end"),
        pytest.param(drips(b"HTTP/1.1 200 OK\r\nA: "), "within 1 s", id="a header without an end"),
        pytest.param(drips(b"HTTP/1.1 200 OK\r\n\r\n{"), "within 1 s", id="a body without an end"),
        pytest.param(
            drips(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{"), "within 1 s", id="a slow body"
        ),
    ],
)
def test_an_endless_response_is_an_unreachable_engine(behave, message):
    assert_unreachable(behave, message, IMPATIENCE)


def assert_unreachable(behave, message, timeout):
    with raw(behave) as address:
        error = bounded(lambda: server(address, timeout).get_json("/is_paused"))
    assert isinstance(error, EngineUnreachableError)
    with pytest.raises(EngineUnreachableError, match=message):
        raise error
    assert error.hint


def test_a_refused_connection_is_an_unreachable_engine():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    error = bounded(lambda: server(address).get("/health"))
    assert isinstance(error, EngineUnreachableError)
    assert "refused" in str(error)
    assert address in str(error)


def test_a_listener_that_accepts_no_connection_is_an_unreachable_engine():
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        errors = [bounded(lambda: server(address, 0.3).get("/health")) for _ in range(4)]
    assert all(isinstance(error, EngineUnreachableError) for error in errors)


def test_each_request_uses_its_own_connection():
    ports = []

    def behave(connection, stop):
        ports.append(connection.getpeername()[1])
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        stop.wait(60)

    with raw(behave) as address:
        one = server(address)
        for _ in range(3):
            assert one.get_json("/x") == {}
    assert len(set(ports)) == 3


def test_requests_carry_the_token_the_query_and_the_body(fake):
    fake.post_do = lambda query, body: {"query": query, "body": body}
    told = server(fake.address).post("/do", {"a": 1}, hint="", mode="keep now")
    assert told == {"query": {"mode": "keep now"}, "body": {"a": 1}}


def test_a_path_in_the_address_is_a_prefix(fake):
    fake.get_engines_7_health = lambda query, body: {"well": True}
    assert server(f"{fake.address}/engines/7/").get_json("/health") == {"well": True}


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(fake, status):
    other = FakeServer()
    try:
        to = f"{other.address}/health"
        fake.replies["/health"] = Answer(status, headers=[("Location", to)])
        with pytest.raises(ConfigError, match=to):
            server(fake.address).get("/health")
        fake.replies["/pause"] = Answer(status, headers=[("Location", to)])
        with pytest.raises(ConfigError):
            server(fake.address).post("/pause", hint="")
        assert other.seen == []
    finally:
        other.stop()


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejected_token_is_a_config_error_that_does_not_show_it(fake, status):
    fake.replies["/health"] = Answer(status, {"error": f"no {TOKEN} here"})
    with pytest.raises(ConfigError, match="token") as error:
        server(fake.address).get("/health")
    assert TOKEN not in shown(error.value)


def test_a_missing_endpoint_is_a_config_error_with_a_hint(fake):
    for call in (lambda one: one.get("/is_paused"), lambda one: one.post("/pause", hint="")):
        with pytest.raises(ConfigError, match=r"/pause|/is_paused") as error:
            call(server(fake.address))
        assert error.value.hint == MISSING


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "CUDA out of memory", "code": 500}}, "CUDA out of memory"),
        ({"detail": "no such\nmethod"}, "no such method"),
        ({"success": False, "message": "Failed"}, "Failed"),
        ({"other": 1}, '{"other": 1}'),
        (b"Internal Server Error", "Internal Server Error"),
        (b"\x1b[31mred\x07", "\\[31mred"),
        (b"", "empty answer"),
        (b"x" * 10_000, r"x{300}\.\.\.:"),
    ],
)
def test_an_error_repeats_the_engine_s_message_in_printable_text(fake, body, message):
    fake.replies["/pause"] = Answer(500, body)
    with pytest.raises(LoadFailedError, match=f"POST /pause failed with 500: .*{message}") as error:
        server(fake.address).post("/pause", hint="read its log")
    assert error.value.hint == "read its log"
    assert error.value.path == fake.address
    assert str(error.value).isprintable()


def test_a_token_repeated_by_the_engine_is_masked(fake):
    fake.replies["/pause"] = Answer(500, {"detail": f"bad header: Bearer {TOKEN}"})
    with pytest.raises(LoadFailedError, match=r"Bearer \*\*\*") as error:
        server(fake.address).post("/pause", hint="")
    assert TOKEN not in shown(error.value)


@pytest.mark.parametrize("status", [400, 404, 500, 502, 503])
def test_a_failed_query_is_an_unreachable_engine(fake, status):
    fake.replies["/health"] = Answer(status, {"error": "not now"})
    with pytest.raises(EngineUnreachableError, match=f"{status}: not now"):
        server(fake.address).get("/health")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host:0",
        "unix:/run/x",
        "http://host/?a=b",
        "http://a..b:8000",
        f"http://{'a' * 64}:8000",
        "http://a b:8000",
        "http://host/a b",
        "http://host/\u00fc",
        "",
    ],
)
def test_an_invalid_address_is_a_config_error(address):
    with pytest.raises(ConfigError) as error:
        server(address)
    assert error.value.hint


@pytest.mark.parametrize("address", ["http://me:hunter2@host:1", "http://hunter2@host:1"])
def test_an_address_with_a_secret_is_refused_without_showing_it(address):
    with pytest.raises(ConfigError) as error:
        server(address)
    assert "hunter2" not in shown(error.value)


def test_an_ipv6_address_without_a_port_is_one_with_the_usual_port(monkeypatch):
    asked = []

    def connect(address, *_):
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    for address in ("http://[::1]", "https://[fd00::2]/load"):
        with pytest.raises(EngineUnreachableError):
            server(address).get("/health")
    assert asked == [("::1", 80), ("fd00::2", 443)]


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"{TOKEN}\nanother", f"{TOKEN}\u20ac", f"{TOKEN}\udcff"])
def test_a_token_that_no_header_can_have_is_a_config_error_that_does_not_show_it(fake, token):
    with pytest.raises(ConfigError, match="line feed") as error:
        server(fake.address, token=token).get("/health")
    assert TOKEN not in shown(error.value)
    assert fake.seen == []


def test_proxies_from_the_environment_are_ignored(fake, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    fake.get_health = lambda query, body: {}
    assert server(fake.address).get("/health").status == 200


def test_requests_leave_no_timer_thread(fake):
    fake.get_health = lambda query, body: {}
    before = set(threading.enumerate())
    one = server(fake.address, 30.0)
    for _ in range(20):
        one.get("/health")

    def timers():
        return [
            thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)
        ]

    for _ in range(200):
        if not timers():
            break
        time.sleep(0.05)
    assert timers() == []
