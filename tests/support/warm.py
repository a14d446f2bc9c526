"""Runs a command in a process forked from one that has imported everything.

The start of an interpreter is most of what a short command costs. It belongs to what is disturbed in a sweep, so a
disturbed run has it; the undisturbed runs that follow each of them come from here. They are processes all the
same, each with its own pid and its own end.

As a program it reads the command of each process to fork, a JSON line each, and answers with its exit status.
"""

import atexit
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile

_idle: list[subprocess.Popen[str]] = []


def run_warm(command: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command of this interpreter, `python FILE ...` or `python -m MODULE ...`, undisturbed."""
    assert command[0] == sys.executable
    server = _idle.pop() if _idle else _started()
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as said:
        server.stdin.write(json.dumps([said.name, *command[1:]]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            server.kill()
            _end(server)
            raise subprocess.TimeoutExpired(command, timeout)
        status = int(server.stdout.readline())
        _idle.append(server)
        return subprocess.CompletedProcess(command, status, "", said.read())


def _started() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _end(server: subprocess.Popen[str]) -> None:
    server.communicate()  # it ends where its input does


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def _serve() -> None:
    for name in ("cli.main", "cli.watch", "daemon.run", "observe.journal", "observe.log", "protocol.writer"):
        importlib.import_module(f"syncd.{name}")
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            return _become(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(said: str, *arguments: str) -> None:
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_APPEND)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
