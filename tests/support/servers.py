"""An engine's process that tests start, break and ask."""

import http.client
import json
import socket
import time

import xxhash

from support import forked
from support.broadcasts import ENVIRONMENT, HERE, LONG
from support.ports import free_port


def digest_of(tensors):
    """Return what an engine says that its weights are."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        state.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


class Server:
    """One engine of its own process.

    Args:
        kind: sglang or vllm.
        directory: What it is started from.
        log: Where it writes.
    """

    def __init__(self, kind, directory, log):
        self.kind, self._directory, self._log = kind, str(directory), str(log)
        self.port = free_port()
        self.process = None
        self.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        program = f"{HERE}/programs/engine.py"
        self.process = forked.start(self._log, ENVIRONMENT, program, self.kind, self._directory, self.port)
        deadline = time.monotonic() + LONG
        while not self._answers():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def state(self):
        return self.ask("GET", "/state")

    def break_at(self, at, what, after=0):
        self.ask("POST", "/fault", {"at": at, "what": what, "after": after})

    def log(self):
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()[-4000:]

    def kill(self):
        self.process.kill()
        self.process.wait(LONG)

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
