"""`syncd serve` as its users have it: a real process, real HTTP, real jobs."""

import os
import signal
import socket
import threading
import time

import pytest
from beds import probe
from beds.silent import silent
from support.cli import ROOT, spawn
from support.jobs import explorer, write_step
from support.pages import TIMEOUT, served

from syncd.parts.page import server as dashboard_server
from syncd.parts.page.server import MOST_CONNECTIONS, PageServer, serve_in_background
from syncd.parts.page.site import PageContent
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job.at(tmp_path_factory.mktemp("jobs") / "job")
    os.mkdir(job.root)
    for step in (1, 2):
        write_step(job, step)
    with spawn("watch", job.root, "--once", "--log-level", "error") as once:
        assert once.wait(TIMEOUT) == 0
    explorer(job, SystemClock(), "e0", applied=(1, 1))
    return job


@pytest.fixture(scope="module")
def page(job):
    with served(job.root, "--every", "0.5") as page:
        yield page


# --- what is answered ---------------------------------------------------------------------------------------


def test_served_data_equals_status_and_ls(page, job, shell):
    document = page.get().document
    assert document["schema_version"] == 2
    assert document["serving"]["state"] == "fresh"
    status, ls = shell("status", job.root, "--json").document, shell("ls", job.root, "--json").document
    assert set(document["status"]) | {"schema_version"} == set(status)
    for name in ("job", "marker", "newest_complete", "steps", "filling", "requests"):
        assert document["status"][name] == status[name], name
    assert document["status"]["version"]["digest"] == status["version"]["digest"]
    assert document["ls"]["steps"] == ls["steps"][::-1]
    assert document["ls"]["policy"] == ls["policy"]
    assert "version_published" in {event["event"] for event in document["events"]}


def test_served_data_shows_a_new_explorer(page, job):
    explorer(job, SystemClock(), "late", applied=(1, 2))
    until(page, lambda found: "late" in [item["id"] for item in found["status"]["explorers"]])


@pytest.mark.parametrize(
    "path", ["/", "/page.css", "/page.js", "/sections.js", "/icon.svg", "/data.json", "/?x=1"]
)
def test_every_reply_has_security_headers(page, path):
    reply = page.get(path)
    assert reply.status == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["connection"] == "close"
    assert "access-control-allow-origin" not in reply.headers
    assert "python" not in reply.headers["server"].lower()


@pytest.mark.parametrize("path", ["/", "/data.json"])
def test_head_is_get_without_the_body(page, path):
    reply = page.get(path, "HEAD")
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_methods_other_than_get_and_head_are_refused_with_405(page, method):
    reply = page.get("/data.json", method)
    assert reply.status == 405
    assert reply.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/nothing", "/../server.py", "/static/page.js", "/%2e%2e/x", "/<b>"])
def test_unknown_paths_are_answered_with_404(page, path):
    reply = page.get(path)
    assert reply.status == 404
    assert reply.body == b"404 Not Found\n", "nothing of the request comes back"
    assert reply.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8420", 200),
        ("evil.example", 421),
        ("", 421),
        (socket.gethostname(), 200),
        ("localhost.evil.example", 421),
        ("10.1.2.3", 421),
    ],
)
def test_a_foreign_host_header_is_refused(page, host, status):
    assert page.get(Host=host).status == status


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"505"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * 70000 + b"\r\n\r\n", b"431"),
    ],
)
def test_malformed_requests_are_refused(page, request_bytes, status):
    try:
        answer = page.raw(request_bytes)
    except ConnectionResetError:
        return  # the rest was not read: the answer may be lost with it
    assert status in answer.split(b"\r\n")[0]
    assert b"Traceback" not in answer


def test_a_second_request_on_a_connection_is_not_answered(page):
    one = b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert page.raw(one + one).count(b"HTTP/1.1 200") == 1


def test_text_from_a_job_is_served_as_json_data_and_never_as_markup(tmp_path):
    job = Job.at(tmp_path)
    hostile = "<script>alert(1)</script>\n\u202e&\"'"
    explorer(job, SystemClock(), "e0", host=hostile, pid=1)
    with open(job.marker, "w") as file:
        file.write("<img src=x onerror=alert(1)>")
    os.mkdir(f"{job.root}/global_step_1<b>")
    with served(job.root) as page:
        reply = page.get()
    assert reply.headers["content-type"] == "application/json"
    assert reply.body.isascii()
    assert reply.document["status"]["explorers"][0]["host"] == hostile


# --- limits -------------------------------------------------------------------------------------------------


class Still:
    """A site that answers when told."""

    def __init__(self):
        self.go = threading.Event()

    def at(self, path, query):
        assert self.go.wait(TIMEOUT)
        return PageContent(b"x", "text/plain")


@pytest.fixture
def still():
    site = Still()
    yield site
    site.go.set()


def connected(server):
    return socket.create_connection(("127.0.0.1", server.server_port), TIMEOUT)


ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def everything(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_connections_over_the_limit_get_503_and_others_are_answered(still):
    server = PageServer("127.0.0.1", 0, still)
    stop = serve_in_background(server)
    try:
        busy = [connected(server) for _ in range(MOST_CONNECTIONS)]
        for connection in busy:
            connection.sendall(ASK)
        with connected(server) as one_more:
            assert everything(one_more).startswith(b"HTTP/1.1 503 ")
        still.go.set()
        for connection in busy:
            with connection:
                assert everything(connection).startswith(b"HTTP/1.1 200 ")
        with connected(server) as later:
            later.sendall(ASK)
            assert everything(later).startswith(b"HTTP/1.1 200 ")
    finally:
        stop()


def test_a_failing_handler_is_answered_with_500():
    class Broken:
        def at(self, path, query):
            raise ZeroDivisionError(path)

    server = PageServer("127.0.0.1", 0, Broken())
    stop = serve_in_background(server)
    try:
        with connected(server) as connection:
            connection.sendall(ASK)
            assert everything(connection).startswith(b"HTTP/1.1 500 ")
    finally:
        stop()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", ASK[:-2]])
def test_an_unfinished_request_is_cut_off(still, sent):
    server = PageServer("127.0.0.1", 0, still, limit=0.2)
    stop = serve_in_background(server)
    try:
        with connected(server) as connection:
            connection.sendall(sent)
            assert everything(connection) == b""
    finally:
        stop()


def test_a_silent_connection_is_cut_off(still, monkeypatch):
    monkeypatch.setattr(dashboard_server.PageHandler, "timeout", 0.2)
    server = PageServer("127.0.0.1", 0, still)
    stop = serve_in_background(server)
    try:
        with connected(server) as connection:
            assert everything(connection) == b""
    finally:
        stop()


# --- a look that never comes back ---------------------------------------------------------------------------


def test_a_hung_poll_blocks_neither_the_page_nor_the_exit(job, tmp_path):
    """The configuration is a pipe that nobody writes to: reading it hangs in the kernel, as a dead mount does."""
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    with served(job.root, "--config", pipe, "--every", "0.5") as page:
        document = page.get().document
        assert document["serving"]["state"] == "starting"
        assert document["serving"]["looking_for"] > 0
        assert document["status"] is None
        assert page.get("/").status == 200
        pipe.write_text("[daemon]\nkeep_last = 7\n")
        known = until(page, lambda found: found["status"])
        assert known["ls"]["policy"]["keep_last"] == 7
        hanging = until(page, lambda found: found["serving"]["state"] == "stuck")
        assert hanging["status"]["job"] == job.root, "what was known"
        assert hanging["serving"]["at"] == known["serving"]["at"], "and since when"
        assert hanging["serving"]["age"] > hanging["serving"]["looking_for"] > 0
        page.process.terminate()
        assert page.process.wait(TIMEOUT) == 0


def test_experiences_on_a_mount_that_never_answers_stop_nothing_else(tmp_path):
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    job = Job.at(tmp_path / "job")
    os.makedirs(f"{job.root}/experiences/e0")
    with served(job.root, "--every", "0.5", "--rollouts") as page:
        with silent(f"{job.root}/experiences"):
            hangs = page.get("/rollouts.json").document
            assert (hangs["serving"]["state"], hangs["rollouts"]) == ("starting", [])
            for path in ("/data.json", "/charts.json", "/lanes.json"):
                assert page.get(path).document["serving"]["state"] == "fresh", path
            assert page.get("/rollout.json?explorer=e0&batch=1").document["state"] == "reading"
        until(page, lambda found: found["serving"]["state"] == "fresh", "/rollouts.json")


def test_a_mount_that_never_answers_hangs_neither_the_page_nor_its_end(tmp_path):
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    job = Job.at(tmp_path / "job")
    os.mkdir(job.root)
    with served(job.root, "--every", "0.5", "--rollouts") as page:
        assert page.get().document["serving"]["state"] == "fresh"
        with silent(job.root):
            for path in ("/data.json", "/charts.json", "/lanes.json", "/rollouts.json"):
                assert until(page, lambda found: found["serving"]["looking_for"], path)["serving"]
            assert page.get("/").status == 200
            page.process.terminate()
            assert page.process.wait(TIMEOUT) == 0


def until(page, holds, path="/data.json"):
    ends = time.monotonic() + 2 * TIMEOUT
    while not holds(found := page.get(path).document):
        assert time.monotonic() < ends, found["serving"]
        time.sleep(0.1)
    return found


def test_a_missing_job_is_reported_and_shown_again_once_it_is_back(tmp_path):
    job = Job.at(tmp_path / "job")
    os.mkdir(job.root)
    with served(job.root, "--every", "0.5") as page:
        assert page.get().document["serving"]["state"] == "fresh"
        os.rename(job.root, f"{job.root}-gone")
        failing = until(page, lambda found: found["serving"]["state"] == "failing")
        assert failing["serving"]["error"]["code"] == "job_missing"
        assert failing["serving"]["error"]["hint"]
        assert failing["status"]["job"] == job.root
        os.rename(f"{job.root}-gone", job.root)
        until(page, lambda found: found["serving"]["state"] == "fresh")


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_exits_with_0_on_a_signal(job, number):
    with served(job.root) as page:
        page.get()
        page.process.send_signal(number)
        assert page.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize(
    ("code", "args", "said"),
    [
        (74, ["{job}/none"], "the job directory does not exist"),
        (2, ["{job}", "--keep-last", "0"], "keep_last"),
        (78, ["{job}", "--port", "{taken}"], "cannot listen on 127.0.0.1"),
        (2, [""], "it is empty"),
        (2, ["{job}/global_step_2"], "is a step"),
        (2, ["{job}", "--host", "0.0.0.0"], "no password"),
        (2, ["{job}", "--host", "example.org"], "no address"),
        (2, ["{job}", "--port", "65536"], "--port"),
        (2, ["{job}", "--every", "0"], "--every"),
        (2, [], "--root: one of the two"),
        (2, ["{job}", "--root", "{job}"], "--root: one of the two"),
        (2, ["{job}", "{job}/..", "--state-dir", "{job}"], "--state-dir belongs to one JOB"),
        (2, ["{job}"] * 65, "65 jobs are more than 64"),
        (74, ["--root", "{job}/none"], "{job}/none"),
        (74, ["{job}", "{job}/none"], "the job directory does not exist"),
    ],
)
def test_invalid_serve_options_end_the_command(job, code, args, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = [arg.format(job=job.root, taken=taken.getsockname()[1]) for arg in args]
        with spawn("serve", *shown) as process:
            out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (code, ""), err
    assert said.format(job=job.root) in err
    assert "Traceback" not in err


def test_expose_listens_beyond_this_host_with_a_warning(job):
    with spawn("serve", job.root, "--host", "0.0.0.0", "--expose", "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT)
    assert url.startswith(f"http://{socket.gethostname()}:")
    assert err.startswith("warning: no password")


def test_serve_listens_on_ipv6(job):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with served(job.root, "--host", "::1") as page:
        assert page.url.startswith("http://[::1]:")
        assert page.get("/").status == 200


def test_serve_writes_nothing_into_the_job(job):
    before = sorted((where, sorted(names), sorted(files)) for where, names, files in os.walk(job.root))
    with served(job.root) as page:
        page.get()
    assert before == sorted(
        (where, sorted(names), sorted(files)) for where, names, files in os.walk(job.root)
    )


def test_serve_help_has_an_example(shell):
    done = shell("serve", "--help")
    assert done.code == 0
    assert "syncd serve /ckpt/job" in done.out
    assert "--expose" in done.out


def test_page_files_and_dashboards_are_in_the_package(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    distribution = setuptools.Distribution()
    distribution.parse_config_files(["setup.cfg"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    (names,) = [names for package, _, _, names in build.data_files if package == "syncd"]
    packaged = {name for name in names if name.startswith("parts/page/static/")}
    assert packaged == {
        f"parts/page/static/{path.name}" for path in (ROOT / "syncd/parts/page/static").iterdir()
    }
    monitoring = dict(distribution.data_files)["share/syncd/monitoring"]
    assert all((ROOT / name).is_file() for name in monitoring)
