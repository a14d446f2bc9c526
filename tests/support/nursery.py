"""Processes forked from one that has imported torch: its import is most of what a small process costs.

Each is a process of its own, with its own pid, signals and end. As a program it reads a JSON line for each thing
to do and answers each with one; when its input ends it kills what it has started.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time


class Nursery:
    """Starts processes in what `ENVIRONMENT` says."""

    def __init__(self, environment):
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, log, *command):
        """Start `FILE ...` or `-m MODULE ...`; what it says goes to a file."""
        return Child(self, self.ask("start", str(log), *map(str, command)))

    def ask(self, *words):
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self):
        self._server.communicate(timeout=60)


class Child:
    """One process of a nursery, by the names of `subprocess.Popen`."""

    def __init__(self, nursery, pid):
        self._nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._nursery.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _serve():
    from safetensors.torch import load_file  # noqa: F401

    importlib.import_module("syncd.parts.broadcast.send")

    started = {}
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "start":
            pid = os.fork()
            if pid == 0:
                return _become(*rest)
            started[pid] = None
            answer = pid
        elif word == "import":
            importlib.import_module(rest[0])
            answer = True
        else:
            found, status = os.waitpid(rest[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
            if found:
                del started[rest[0]]
        print(json.dumps(answer), flush=True)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _become(log, *arguments):
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.path[0] = os.path.dirname(arguments[0])
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
