"""A real inference engine as a process of this session, in a virtual environment of its own."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time

import pytest

from support import paths
from support.ports import free_port

STARTING = 600.0
"""Seconds that a start may take on a busy machine; a quiet one needs 30 to 90."""

ROOT = str(paths.ROOT)


def python_of(variable, default):
    """Return the interpreter of an engine's environment, or skip the whole module with what to run."""
    target = default.partition("/")[0].removeprefix(".venv-")
    given = os.environ.get(variable)
    if given is None and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip(
            f"a real engine needs the machine for itself: run make test-{target}", allow_module_level=True
        )
    python = given or f"{ROOT}/{default}"
    if not os.access(python, os.X_OK):
        pytest.skip(f"no {python}: run make test-{target}, or set {variable}", allow_module_level=True)
    return python


class EngineProcess:
    """An engine and its children, which end together.

    Args:
        argv: The command; the port stands where it says `{port}`.
        env: What its environment has besides this process's own.
        log: Where its output goes, appended over restarts.
        ready: The path that answers 200 once it serves.
    """

    def __init__(self, argv, env, log, ready="/health"):
        self.port = free_port()
        self.argv = [part.replace("{port}", str(self.port)) for part in argv]
        self.env = env
        self._env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env
        self.log = str(log)
        self._ready = ready
        self._process = None
        self.started_in = 0.0

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        before = time.monotonic()
        with open(self.log, "ab") as out:
            self._process = subprocess.Popen(
                self.argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - before > STARTING:
                self.kill()
                pytest.fail(f"the engine did not start:\n{self.tail()}")
            time.sleep(0.5)
        self.started_in = time.monotonic() - before

    def kill(self):
        """End the engine and all its children at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None
            self._await_gone()

    @contextlib.contextmanager
    def hung(self):
        """Stop every process of the engine for a while."""
        group = self._process.pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    def tail(self, size=4000):
        with open(self.log, "rb") as file:
            return file.read()[-size:].decode("utf-8", "replace")

    def heard(self, path):
        """Return how often the engine's access log names a path."""
        with open(self.log, "rb") as file:
            return file.read().count(path.encode())

    def _answers(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        return False

    def _await_gone(self):
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) != 0:
                    return
            time.sleep(0.1)
        pytest.fail("the engine's port is still open")
