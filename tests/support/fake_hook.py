"""An engine with switches to fail, in this process or in one of its own, and the hook that drives it.

fake_hook.py    serves an engine by HTTP until its parent ends; prints its port
"""

import hashlib
import http.client
import json
import os
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from explorer_hooks.hook import ProbeAnswer, ProbingHook, Running
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.transports.tensors import TensorMeta

START = "start"
HALF = "half loaded"
ERRORS = (RefusedError, LoadFailedError, EngineDeadError, EngineUnreachableError)


class FakeEngine:
    """An engine that can be told to go wrong.

    `fails` counts how often each operation fails before it works; `blocked` operations wait to be released.
    """

    def __init__(self):
        self.label = None
        self.paused = False
        self.weights = START
        self.log = []
        self.fails = Counter()
        self.lies = None
        self.is_gone = False
        self.why_gone = None
        self.cannot_go_back = False
        self.blocked = {}
        self.reached = Counter()
        self.doing = {}
        self.answers_as = None
        """The weights with which it answers probes whatever it has loaded, None for those that it has loaded."""
        self.cached = None
        self.gives_checksums = False
        self.others_answer_as = []
        """The weights with which its further replicas answer probes."""

    def call(self, name, *arguments):
        self.reached[name] += 1
        if name in self.blocked:
            assert self.blocked[name].wait(60)
        if name in self.doing:
            self.doing[name]()
        if self.is_gone:
            raise EngineUnreachableError("nobody answers", hint="start the engine") from self.why_gone
        if name not in ("info", "probe", "checksums"):
            self.log.append(name)
        return getattr(self, name)(*arguments)

    def _maybe(self, name, error):
        if self.fails[name] > 0:
            self.fails[name] -= 1
            raise error(f"{name} went wrong")

    def prepare(self, path):
        self._maybe("prepare", RefusedError)

    def load(self, path):
        self.paused = True
        self.weights = HALF
        self._maybe("load", LoadFailedError)
        try:
            self.weights = digest_of(path)
        except OSError as error:
            raise LoadFailedError(str(error)) from error

    def commit(self, label):
        self._maybe("commit", LoadFailedError)
        self.label = label
        self.paused = False

    def probe(self, tokens):
        self._maybe("probe", LoadFailedError)
        return logprobs_of(self.answers_as or self.weights, tokens)

    def checksums(self):
        if not self.gives_checksums:
            return None
        return {"dp0": {"model.a": self.answers_as or self.weights}}

    def reload_start(self):
        self.paused, self.weights = True, HALF
        self._maybe("load", LoadFailedError)
        self.paused, self.weights = False, START

    def info(self):
        return {"label": self.lies or self.label, "paused": self.paused, "weights": self.weights}

    def abort(self, path, label):
        if self.cannot_go_back or (path is None and self.weights == HALF):
            raise EngineDeadError("it cannot go back", hint="restart the engine")
        if path is not None:
            self.weights, self.label = digest_of(path), label
        self.paused = False

    def restart(self):
        self.label, self.paused, self.weights, self.is_gone = None, False, START, False


def digest_of(path):
    """Return what tells the weights of one version from those of another: every byte of its shards."""
    state = hashlib.sha256()
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with open(f"{path}/{name}", "rb") as file:
                state.update(file.read())
    return state.hexdigest()


def logprobs_of(weights, tokens):
    """Return the log-probs that a fake engine with these weights gives: other weights are at least 0.01 nats off."""
    value = -1.0 - int(hashlib.sha256(weights.encode()).hexdigest()[:4], 16) / 100
    return [[value] * (len(row) - 1) for row in tokens]


class FakeHook(ProbingHook):
    """Drives a fake engine."""

    name = "fake"

    def __init__(self, engine, kinds=frozenset({"weights"}), tensors=None, probes=""):
        self.engine, self.kinds, self.known, self.probes = engine, kinds, tensors, probes
        self.reloads_start = False
        self.rounds = ""
        self.prepared = []
        self.aborted = []

    @classmethod
    def from_options(cls, options):
        return cls(RemoteEngine(int(options.address.rpartition(":")[2]), options.timeout))

    def tensors(self):
        return self.known

    def prepare(self, target):
        self.prepared.append(target)
        self.engine.call("prepare", target.path)

    def load(self, target):
        self.engine.call("load", target.path)

    def commit(self, target):
        self.engine.call("commit", target.label)

    def current_version(self):
        found = self.engine.call("info")
        return Running(found["label"], found["paused"])

    def probe(self, target, tokens):
        answer = ProbeAnswer(
            tuple(map(tuple, self.engine.call("probe", tokens))), *self.engine.cached or (None, None)
        )
        others = [logprobs_of(weights, tokens) for weights in self.engine.others_answer_as]
        return answer._replace(others=tuple(ProbeAnswer(tuple(map(tuple, rows))) for rows in others))

    def checksums(self):
        return self.engine.call("checksums")

    def reload_start(self):
        if self.reloads_start:
            self.engine.call("reload_start")
        return self.reloads_start

    def dtype(self):
        return "float32"

    def rounding(self):
        return self.rounds

    def abort(self, last_good):
        self.aborted.append(last_good)
        good = (None, None) if last_good is None else (last_good.path, last_good.label)
        self.engine.call("abort", *good)


def tensors_of(**shapes):
    return {name: TensorMeta("F32", shape) for name, shape in shapes.items()}


class RemoteEngine:
    """An engine in another process."""

    def __init__(self, port, timeout=30.0):
        self._port, self._timeout = port, timeout

    def call(self, name, *arguments):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)
            connection.request("POST", f"/{name}", json.dumps(arguments))
            answer = json.loads(connection.getresponse().read())
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineUnreachableError(f"the engine does not answer: {error}") from error
        if "error" in answer:
            raise next(kind for kind in ERRORS if kind.code == answer["code"])(answer["error"])
        return answer["result"]


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine

    def do_POST(self):
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = {"result": self._run(self.path.removeprefix("/"), arguments)}
        except ERRORS as error:
            answer = {"error": error.message, "code": error.code}
        data = json.dumps(answer).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # whoever asked was killed

    def _run(self, name, arguments):
        engine = self.engine
        if name == "block":
            engine.blocked[arguments[0]] = threading.Event()
        elif name == "release":
            engine.blocked.pop(arguments[0]).set()
        elif name == "set":
            setattr(engine, *arguments)
        elif name == "fail":
            engine.fails[arguments[0]] += arguments[1]
        elif name == "restart":
            engine.restart()
        elif name == "seen":
            return {"log": engine.log, "reached": engine.reached, **engine.info()}
        else:
            return engine.call(name, *arguments)
        return None

    def log_message(self, *_):
        pass


def main():
    _Handler.engine = FakeEngine()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    server.serve_forever()


def _end_with_parent(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()
