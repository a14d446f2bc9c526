"""Programs as processes forked from one that has imported what they need: the imports are most of what they cost.

One server for each kind of program serves all workers of pytest-xdist, from the first program to the end of the run.
What it starts is a process with its own pid, signals and end, its own environment and directory; only the imports are
shared. A GPU's driver does not survive a fork: where there is one, each program is started anew.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from support.paths import PYTHONPATH, ROOT, TESTS
from syncd.errors import SyncdError

_TRANSFORMERS = tuple(
    f"transformers.{name}"
    for name in (
        "models.auto.modeling_auto", "models.auto.tokenization_auto", "models.llama.modeling_llama",
        "models.qwen2.modeling_qwen2", "tokenization_python", "tokenization_utils_tokenizers", "generation.utils",
    )
)  # fmt: skip
_TORCH = (
    "safetensors.torch", "trainer.run", "trainer.cli.train", "trainer.engines.files", "torch.distributed.run",
    "syncd.transports.files.step_saver", "explorer_hooks.follower.follower", "explorer_hooks.run.run",
    "explorer_hooks.run.weight_sources", "syncd.experience.table",
    # What comes with the first step of an optimizer, and the first batch.
    "torch._dynamo", "pandas", *_TRANSFORMERS,
)  # fmt: skip
_IMPORTS = {
    "syncd": tuple(
        f"syncd.{name}"
        for name in (
            "cli.main",
            "cli.watch",
            "daemon.run",
            "observe.journal",
            "observe.log",
            "protocol.writer",
        )
    ),
    "torch": _TORCH,
    "verl": (*_TORCH, "trainer.engines.verl.engine", "peft"),
}
"""What the programs of each kind find imported; what an installation lacks is left out."""

TAKEN = []
"""The seconds of a processor that each program of this process took that has ended: they are no children of it."""


class Process:
    """A program, by the names of `subprocess.Popen`."""

    def __init__(self, connection, pid, log):
        self._connection, self.pid, self.returncode, self._log = connection, pid, None, log

    def __del__(self):
        self._connection.close()  # the server ends what nobody waits for

    def poll(self):
        return self._ended(0.0)

    def wait(self, timeout=None):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def _ended(self, timeout):
        if self.returncode is None and _readable(self._connection, timeout):
            with self._connection, self._connection.makefile() as answer:
                self.returncode, seconds = json.loads(answer.readline())
            TAKEN.append(seconds)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def end(self):
        self.kill()
        self.wait(60)

    def said(self):
        """Return what is in its log."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self._log).read_text(encoding="utf-8", errors="replace")
        return ""  # it has not begun


class _Started(subprocess.Popen):
    """A program that is started anew, by the names of `Process`."""

    def __init__(self, log, *args, **more):
        self._log = log
        super().__init__(*args, **more)

    def end(self):
        self.kill()
        self.wait(60)

    said = Process.said


def start(log, environment, *argv, kind="torch", cwd=None):
    """Start `FILE ...`, `-m MODULE ...` or `-c CODE ...`; what it says is appended to a file.

    What reads the environment at its import has that of the server. Torch is told its number of threads.

    Args:
        log: The file.
        environment: Variables beside our own, of which those that syncd reads are left out.
        argv: The program and its arguments.
        kind: What it imports: a key of `_IMPORTS`.
        cwd: Its directory if it is not ours.
    """
    argv, cwd = [str(part) for part in argv], str(cwd or os.getcwd())
    kept = {name: value for name, value in os.environ.items() if "SYNCD" not in name}
    environment = {**kept, "PYTHONPATH": str(ROOT), **environment}
    if os.path.exists("/dev/nvidiactl"):
        with open(log, "ab") as file:
            return _Started(
                log, [sys.executable, *argv], env=environment, cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
    connection = _connected(kind)
    connection.sendall(json.dumps([os.path.abspath(log), environment, cwd, argv]).encode() + b"\n")
    return Process(connection, int.from_bytes(connection.recv(8)), log)


def run_forked(command, timeout=60):
    """Run a command line of this interpreter, which imports what `syncd` does, to its end."""
    assert command[0] == sys.executable
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as said:
        process = start(said.name, {"PYTHONPATH": PYTHONPATH}, *command[1:], kind="syncd")
        try:
            process.wait(timeout)
        finally:
            process.end()
        return subprocess.CompletedProcess(command, process.returncode, "", said.read())


def _connected(kind):
    """Connect to the server of a kind, which the first who needs it starts."""
    run, owner = os.environ.get("PYTEST_XDIST_TESTRUNUID"), os.getpid()
    if run is not None:
        owner = os.getppid()  # workers are children of the process that gives them work
    path = f"{tempfile.gettempdir()}/syncd-forks-{kind}-{run or owner}"
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{path}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            connection.connect(path)
            return connection
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
        with socket.socket(socket.AF_UNIX) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a server that ended before its time
            listener.bind(path)
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, __file__, kind, str(listener.fileno()), path, str(owner)],
                env=environment, pass_fds=[listener.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            server.returncode = 0  # it ends by itself, later than we do
            connection.connect(path)
    return connection


def _readable(connection, timeout):
    with selectors.PollSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout))


# --- the server ---------------------------------------------------------------------------------------------------


class _Server:
    """Forks programs until the process that it serves has ended."""

    def __init__(self, kind, listener, path, owner):
        self._listener, self._path, self._running = socket.socket(fileno=int(listener)), path, {}
        own = os.environ["PYTHONPATH"].split(os.pathsep)
        self._base = [path for path in sys.path[1:] if path not in own]
        self._selector = selectors.DefaultSelector()
        self._owner = os.pidfd_open(int(owner))
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with _as_trainers_do() if kind == "verl" else contextlib.nullcontext():
            for name in _IMPORTS[kind]:
                with contextlib.suppress(ImportError, SyncdError):  # the latter: of another release of verl
                    importlib.import_module(name)
        gc.freeze()  # a collection in a forked process leaves these pages shared
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes)
        for source in (self._listener, self._owner, self._woken):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self):
        """Return what a forked process is to become; in the server itself None, at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
                    return self._end()
                if key.fileobj is self._listener:
                    connection = self._listener.accept()[0]
                    request = json.loads(connection.makefile().readline())
                    if (pid := os.fork()) == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        self._forget(connection)
                        return self._base, request
                    connection.sendall(pid.to_bytes(8))
                    self._running[pid] = connection
                    self._selector.register(connection, selectors.EVENT_READ, pid)
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                else:
                    self._kill(key.data)  # who started it has gone
                    self._selector.unregister(key.fileobj)
            self._reap()

    def _forget(self, connection):
        """Close what is the server's own, and end with it: 1 is PR_SET_PDEATHSIG."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        for source in (self._listener, connection, *self._running.values(), self._selector):
            source.close()
        for descriptor in (self._owner, self._woken, self._wakes):
            os.close(descriptor)

    def _reap(self):
        with contextlib.suppress(ChildProcessError):
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = found
                connection = self._running.pop(pid)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                answer = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
                with connection, contextlib.suppress(OSError):
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    @staticmethod
    def _kill(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _end(self):
        for pid in self._running:
            self._kill(pid)
        for path in (self._path, f"{self._path}.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@contextlib.contextmanager
def _as_trainers_do():
    """Have verl find its platform before it is imported; there is no GPU where programs are forked."""
    from trainer.engines.verl import quiet_import

    with quiet_import():
        with contextlib.suppress(ImportError, SyncdError):
            from trainer.engines.verl import platform

            platform.install()
        yield


def _become(base, request):
    """Be a program to its end."""
    log, environment, cwd, argv = request
    null, output = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
    )
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    # Where torch is not imported yet, it reads the variable itself.
    if (threads := environment.get("OMP_NUM_THREADS")) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    own = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([*filter(None, own), *base]))
    _leave(_exit_code_of(_run, argv, cwd))


def _run(argv, cwd):
    """Run a program as the interpreter would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, cwd)
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


def _exit_code_of(call, *args):
    """Return what the interpreter would exit with."""
    try:
        call(*args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 -- a process of its own would end with it
        traceback.print_exc()
        return 1
    return 0


def _leave(code):
    """End as an interpreter does, but take nothing apart: that would copy every page of what was imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    if (forked := _Server(*sys.argv[1:]).serve()) is not None:
        _become(*forked)
