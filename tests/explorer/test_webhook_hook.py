"""The hook that posts: the contract with a real receiver, who checks signatures by himself."""

import contextlib
import hashlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.hook_contract import PATIENCE, Bed, HookContract, load
from support.targets import label, target_of
from test_callback_hook import START, content_of, write_shards

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.webhook import WebhookHook, document_of, signed
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError

KEY = "a-key-that-nobody-may-see"


class Receiver(ThreadingHTTPServer):
    """An engine behind a URL; whatever it is told to fail in fails once."""

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.weights, self.label, self.paused = START, None, False
        self.failing, self.statuses, self.deliveries, self.seen = set(), {}, set(), []
        self.free = threading.Event()
        self.free.set()
        self.answers_get, self.body = True, None
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def end(self):
        self.free.set()
        self.shutdown()
        self.server_close()

    def take(self, document):
        phase, label = document["phase"], document["label"]
        if phase in ("load", "abort"):
            self.paused, self.weights = True, b"half"
            if phase in self.failing:
                self.failing.discard(phase)
                return 500
            self.weights = b""
            for shard in document["shards"]:
                with open(f"{document['path']}/{shard['name']}", "rb") as file:
                    self.weights += file.read()
        if phase in ("commit", "abort"):
            if "commit" in self.failing:
                self.failing.discard("commit")
                return 500
            self.label, self.paused = label, False
        return self.statuses.get(phase, 200)


class Handler(BaseHTTPRequestHandler):
    def is_genuine(self, body):
        """Check a request as docs/follow-other-engines.md says."""
        when = self.headers["X-Syncd-Timestamp"]
        expected = hmac.new(KEY.encode(), when.encode() + b"." + body, hashlib.sha256).hexdigest()
        same = hmac.compare_digest(f"sha256={expected}", self.headers["X-Syncd-Signature"])
        return same and abs(time.time() - int(when)) < 300

    def do_POST(self):
        self.server.free.wait(30)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.is_genuine(body):
            self.answer(401, {"message": "who are you"})
            return
        document = json.loads(body)
        if document["delivery"] in self.server.deliveries:
            self.answer(409, {"message": "I had that"})
            return
        self.server.deliveries.add(document["delivery"])
        self.server.seen.append((dict(self.headers), body))
        status = self.server.take(document)
        self.answer(status, {"message": f"{document['phase']} with {status}, key {KEY}"})

    def do_GET(self):
        self.server.free.wait(30)
        if not self.server.answers_get:
            self.send_error(405)
        elif not self.is_genuine(b""):
            self.answer(401, {})
        else:
            running = {"label": self.server.label, "paused": self.server.paused}
            self.answer(200, running if self.server.body is None else self.server.body)

    def answer(self, status, document):
        body = json.dumps(document).encode()
        with contextlib.suppress(OSError):  # whoever asked may have gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class ReceiverBed(Bed):
    token = KEY

    def __init__(self, directory):
        self.directory, self.receiver = directory, Receiver()
        self.port = self.receiver.server_port

    def close(self):
        self.receiver.end()

    def open(self):
        address, settings = f"http://127.0.0.1:{self.port}/load", {"ask_timeout": str(self.patience)}
        return WebhookHook(HookOptions(address=address, token=KEY, timeout=self.patience, settings=settings))

    def target(self, pair, *, shards=1):
        place = self.directory / f"{pair[0]}.{pair[1]}-{shards}"
        write_shards(place, 31 * pair[0] + pair[1], shards)
        return target_of(place, pair)

    def runs(self, target):
        return self.receiver.weights == (START if target is None else content_of(target))

    def is_paused(self):
        return self.receiver.paused

    def pause(self):
        self.receiver.paused = True

    def fail_load(self, target):
        self.receiver.failing.add("load")

    def fail_commit(self):
        self.receiver.failing.add("commit")

    @contextlib.contextmanager
    def gone(self):
        was = self.receiver
        was.end()
        yield
        self.receiver = Receiver(self.port)
        self.receiver.weights, self.receiver.label = was.weights, was.label

    @contextlib.contextmanager
    def hung(self):
        self.receiver.free.clear()
        yield
        self.receiver.free.set()

    def restart(self):
        self.receiver.end()
        self.receiver = Receiver(self.port)


class TestReceiver(HookContract):
    bed_type = ReceiverBed


@pytest.fixture
def bed(tmp_path):
    with ReceiverBed(tmp_path) as bed:
        yield bed


@pytest.fixture
def target(bed):
    return bed.target((2, 7))


def test_each_post_has_the_phase_the_version_and_its_path(bed, target):
    hook = bed.open()
    load(hook, target)
    hook.abort(target)
    documents = [json.loads(body) for _, body in bed.receiver.seen]
    assert [document["phase"] for document in documents] == ["prepare", "load", "commit", "abort"]
    assert len({document.pop("delivery") for document in documents}) == 4
    assert documents[1] == {
        "protocol": 1, "phase": "load", "label": label(7, 2), "generation": 2, "step": 7, "kind": "weights",
        "path": target.path, "digest": target.version.digest, "verified": True,
        "shards": [target.shards[0]._asdict()],
    }  # fmt: skip


def test_the_key_is_never_sent(bed, target):
    load(bed.open(), target)
    assert bed.receiver.seen
    assert not any(KEY in f"{headers}{body}" for headers, body in bed.receiver.seen)


def test_a_rejected_signature_is_a_config_error(bed, target):
    address = f"http://127.0.0.1:{bed.port}"
    hook = WebhookHook(HookOptions(address=address, token="another key", timeout=PATIENCE))
    with pytest.raises(ConfigError, match="refuses the token"):
        hook.prepare(target)
    assert bed.runs(None)


def test_a_signature_depends_on_body_time_and_key():
    known = signed("key", b"{}", 1_700_000_000.9)
    assert known["X-Syncd-Timestamp"] == "1700000000"
    assert known["X-Syncd-Signature"] == (
        "sha256=" + hmac.new(b"key", b"1700000000.{}", "sha256").hexdigest()
    )
    others = [signed("key", b"{ }", 1.7e9), signed("key", b"{}", 1.7e9 + 1), signed("kez", b"{}", 1.7e9)]
    assert len({one["X-Syncd-Signature"] for one in (known, *others)}) == 4


@pytest.mark.parametrize(
    ("status", "becomes"),
    [
        (422, RefusedError),
        (409, RefusedError),
        (404, RefusedError),
        (503, EngineUnreachableError),
        (429, EngineUnreachableError),
    ],
)
def test_a_receiver_may_refuse_a_version_or_be_unavailable(bed, target, status, becomes):
    bed.receiver.statuses["prepare"] = status
    with pytest.raises(becomes, match=f"prepare with {status}"):
        bed.open().prepare(target)


@pytest.mark.parametrize("status", [404, 422, 503])
def test_any_error_to_load_or_commit_is_a_failed_load_and_to_abort_a_dead_engine(bed, target, status):
    hook = bed.open()
    bed.receiver.statuses.update(load=status, commit=status, abort=status)
    hook.prepare(target)
    with pytest.raises(LoadFailedError, match=f"load with {status}"):
        hook.load(target)
    with pytest.raises(LoadFailedError, match=f"commit with {status}"):
        hook.commit(target)
    with pytest.raises(EngineDeadError, match=f"abort with {status}"):
        hook.abort(target)


def test_a_key_echoed_by_the_receiver_is_masked(bed, target):
    hook = bed.open()
    bed.receiver.failing |= {"load", "abort"}
    with pytest.raises(LoadFailedError, match=r"load with 500, key \*\*\*"):
        hook.load(target)
    with pytest.raises(EngineDeadError, match=r"abort with 500, key \*\*\*"):
        hook.abort(target)


def test_without_get_the_last_committed_version_is_assumed(bed, target):
    bed.receiver.answers_get = False
    hook = bed.open()
    assert hook.current_version() == Running(None)
    load(hook, target)
    assert hook.current_version() == Running(label(7, 2))


@pytest.mark.parametrize("body", [[], {}, {"label": 7}, {"label": "1.1", "paused": "no"}, "1.1"])
def test_a_malformed_current_version_is_an_unreachable_engine(bed, body):
    bed.receiver.body = body
    with pytest.raises(EngineUnreachableError, match="is not answered with"):
        bed.open().current_version()


def test_each_delivery_has_a_new_id(target):
    assert document_of(target, "load")["delivery"] != document_of(target, "load")["delivery"]


@pytest.mark.parametrize(
    ("address", "token", "ok"),
    [
        ("http://127.0.0.1:9/x", None, True),
        ("http://localhost:9", None, True),
        ("http://[::1]:9", None, True),
        ("https://engine.example", None, True),
        ("http://engine.example", "key", True),
        ("http://engine.example", None, False),
        ("http://10.0.0.8:9", None, False),
        ("http://127.0.0.1.example:9", None, False),
        ("ftp://localhost", None, False),
        ("http://user:key@localhost", None, False),
        ("", None, False),
    ],
)
def test_unsigned_requests_over_plain_http_are_allowed_to_this_host_only(address, token, ok):
    options = HookOptions(address=address, token=token)
    if ok:
        assert isinstance(WebhookHook.from_options(options), WebhookHook)
    else:
        with pytest.raises(ConfigError):
            WebhookHook.from_options(options)


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ConfigError, match="ask_time"):
        WebhookHook.from_options(HookOptions(address="http://127.0.0.1:9", settings={"ask_time": "3"}))
