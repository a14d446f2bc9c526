"""A process that plays episodes of an environment of `verifiers`, several at the same time."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from explorer_hooks.gateway import verifiers_worker
from explorer_hooks.gateway.agent_variables import agent_environment
from syncd.errors import ConfigError

START = 600.0
"""Seconds that an environment may take to load, with its data set."""

GRACE = 15.0
"""Seconds beyond its time that an episode may take to end; then its process is killed."""

_END = 5.0
_LOOK = 0.2
_SHOWN = 80

WorkerAnswer = dict[str, Any]
"""What the process answers: a JSON object, with `problem` if something went wrong."""


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """What is loaded, and by what.

    Args:
        name: The environment.
        options: What verifiers configures it with.
        select: Which of its tasks are played.
        python: The interpreter that has verifiers; empty for this one.
        directories: Directories in which its module is looked for.
        passed: Names of variables of this process that it gets besides those of `agent_environment`.
    """

    name: str
    options: Mapping[str, Any]
    select: Mapping[str, Any]
    python: str
    directories: Sequence[str]
    passed: Sequence[str] = ()


class EnvironmentProcess:
    """A process with a loaded environment.

    Args:
        settings: What is loaded.
        stop: Once it returns true, it is not waited for.

    Raises:
        ConfigError: It cannot be started, or the environment cannot be played.
    """

    def __init__(self, settings: EnvironmentSettings, stop: Callable[[], bool]) -> None:
        self._process = _started(settings)
        self._numbers, self._lock, self._writing = itertools.count(1), threading.Lock(), threading.Lock()
        loading: Future[WorkerAnswer] = Future()
        self._waiting = {0: loading}
        self._has_ended = False
        threading.Thread(target=self._read, name="environment", daemon=True).start()
        asked = {"environment": settings.name, "options": settings.options, "select": settings.select}
        with contextlib.suppress(OSError):  # it has ended; what reads its answers says so
            self._write(asked)
        answer = _loaded(loading, stop)
        if "tasks" not in answer:
            self.kill()
            raise ConfigError(
                f"the environment {settings.name} cannot be played: {answer['problem']}",
                hint=answer.get("hint"),
            )
        self.tasks: Sequence[Mapping[str, str]] = answer["tasks"]

    @property
    def is_running(self) -> bool:
        """Return whether it can be asked."""
        return not self._has_ended and self._process.returncode is None

    def ask(self, asked: Mapping[str, Any], timeout: float) -> WorkerAnswer:
        """Return the answer to a request for an episode; if there is none in time, the process is killed.

        Args:
            asked: The request.
            timeout: Seconds that the episode may take.
        """
        answer: Future[WorkerAnswer] = Future()
        with self._lock:
            if self._has_ended:
                return {"problem": "its process has ended"}
            number = next(self._numbers)
            self._waiting[number] = answer
        try:
            self._write({"id": number, "timeout": timeout, **asked})
            return answer.result(timeout + GRACE)
        except TimeoutError:
            self.kill()
            return {"problem": f"it took more than {timeout:g} s, and its process was killed"}
        except (OSError, ValueError) as error:  # its input is broken, or closed
            return {"problem": f"its process has ended: {error}"}

    def close(self) -> None:
        """Have the process end what it has started; kill it if that takes long."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its group, also what a process has left that has just ended."""
        if self._process.returncode is None:  # nobody has waited for it: the group's number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _write(self, said: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._writing:  # a lock of its own: answers are read while a request waits
            self._process.stdin.write(json.dumps(said) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        """Hand answers to those who wait, until the process has ended or writes what is none."""
        problem = ""
        try:
            problem = self._hand_over()
        finally:
            self.kill()
            with self._lock:
                self._has_ended, left = True, list(self._waiting.values())
            for waiting in left:
                text = problem or f"its process ended with {self._process.returncode}"
                waiting.set_result({"problem": text})

    def _hand_over(self) -> str:
        """Hand answers to those who wait; return what is wrong with a line that is none, nothing at the end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = _answer(line)
                if answer is None:
                    return f"its process wrote what is no answer: {line.strip()[:_SHOWN]!r}"
                with self._lock:
                    waiting = self._waiting.pop(answer.get("id", 0), None)
                if waiting is not None:
                    waiting.set_result(answer)
        return ""


def _answer(line: str) -> WorkerAnswer | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("id", 0), int) else None


def _started(settings: EnvironmentSettings) -> "subprocess.Popen[str]":
    """Start the program.

    Raises:
        ConfigError: It cannot be started.
    """
    python = settings.python or sys.executable
    paths = [*settings.directories, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        return subprocess.Popen(  # noqa: S603 - the user's own interpreter
            [python, "-P", verifiers_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**agent_environment(os.environ, settings.passed), "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        text, hint = f"cannot start {python}: {error.strerror}", "explorer.agent.python names an interpreter"
        raise ConfigError(text, hint=hint) from error


def _loaded(loading: "Future[WorkerAnswer]", stop: Callable[[], bool]) -> WorkerAnswer:
    """Return the first answer."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return loading.result(_LOOK)
        if stop():
            return {"problem": "told to stop"}
    return {"problem": f"it was not loaded after {START:g} s"}
