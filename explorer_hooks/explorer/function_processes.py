"""Calls a function of the user in processes that can be killed if it hangs."""

import contextlib
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from explorer_hooks.explorer.rewards import Score, score_of, scores_of
from syncd.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

START = 120.0
"""Seconds that a process may take to import a function."""

_END = 5.0
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a function has by name.

    Args:
        names: Their names.
        required: Those without a default.
        takes_any: Whether it takes any other, too.
        problem: Why the function cannot be imported, empty if it can.
    """

    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_any: bool = False
    problem: str = ""


class FunctionProcesses:
    """Calls a function in processes that are replaced if a call hangs or kills them.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        workers: Processes.
        directories: Directories in which its module is looked for.

    Raises:
        ConfigError: It cannot be imported.
    """

    def __init__(self, function: str, timeout: float, workers: int, directories: Sequence[str]) -> None:
        self._free: SimpleQueue[FunctionProcess] = SimpleQueue()
        self._workers = [FunctionProcess(function, timeout, directories) for _ in range(workers)]
        try:
            self._workers[0].start()
        except BaseException:
            self.close()
            raise
        self.signature = self._workers[0].signature
        for worker in self._workers:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()

    def call(self, given: Mapping[str, Any], count: int | None = None) -> list[Score]:
        """Return what the function says of these arguments; wait for a free process.

        Args:
            given: Its arguments.
            count: How many scores it returns in a list; None if it returns one score.
        """
        worker = self._free.get()
        try:
            return worker.scores(given, count)
        finally:
            self._free.put(worker)


class FunctionProcess:
    """A process that calls a function, started when it is needed.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        directories: Directories in which its module is looked for.
    """

    def __init__(self, function: str, timeout: float, directories: Sequence[str]) -> None:
        self._function, self._timeout, self._directories = function, timeout, tuple(directories)
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._stopped = False
        self.signature = Signature()

    def start(self) -> Connection:
        """Return the pipe to the process, which is started unless it runs.

        Raises:
            ConfigError: The function cannot be imported.
        """
        with self._lock:
            if self._pipe is not None:
                return self._pipe
            if self._stopped:
                raise ConfigError("the scorer is closed")
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._function, self._directories), daemon=True
            )
            process.start()
            theirs.close()
            self._process, self._pipe = process, ours
        told = self._answer(ours, START)
        if not isinstance(told, Signature) or told.problem:
            self._end()
            what = (
                told.problem
                if isinstance(told, Signature)
                else "its import took too long, or ended its process"
            )
            raise ConfigError(f"the function {self._function} cannot be used: {what}")
        self.signature = told
        return ours

    def scores(self, given: Mapping[str, Any], count: int | None) -> list[Score]:
        """Return what one call says; the same problem for each response if there are several."""
        try:
            pipe = self.start()
            pipe.send((dict(given), count))
        except (OSError, ValueError, TypeError, ConfigError) as error:
            self._end()
            return _failed(f"it could not be called: {error}"[:_SHOWN], count)
        answer = self._answer(pipe, self._timeout)
        if isinstance(answer, list):
            return answer
        self._end()
        return _failed(answer or f"it took more than {self._timeout:g} s", count)

    def stop(self) -> None:
        """End the process, and start no other."""
        self._stopped = True
        self._end()

    def _answer(self, pipe: Connection, timeout: float) -> Any:
        """Return the process's answer, None if it did not answer in time, a text if it has ended."""
        try:
            return pipe.recv() if pipe.poll(timeout) else None
        except (EOFError, OSError):
            return "it ended its process"

    def _end(self) -> None:
        with self._lock:
            process, self._process, pipe, self._pipe = self._process, None, self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.join(_END)


def _failed(problem: str, count: int | None) -> list[Score]:
    return [Score(None, problem=problem)] * (1 if count is None else count)


def _serve(pipe: Connection, function: str, directories: Sequence[str]) -> None:
    """Call the function until the other side is gone. This is the process's main function."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the explorer ends this process
    os.dup2(2, 1)  # what a function prints must not mix with the explorer's output
    try:
        called = _imported(function, directories)
        signature = _signature(called)
    except Exception as error:  # noqa: BLE001 - the user sees any error of the import
        pipe.send(Signature(problem=f"{type(error).__name__}: {error}"[:_SHOWN]))
        return
    pipe.send(signature)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_called(called, *pipe.recv()))


def _imported(function: str, directories: Sequence[str]) -> Any:
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]
    module, _, name = function.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _signature(called: Any) -> Signature:
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # not every function of C has one
        return Signature(takes_any=True)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = tuple(one.name for one in named if one.default is one.empty)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return Signature(tuple(one.name for one in named), required, takes_any)


def _called(called: Any, given: Mapping[str, Any], count: int | None) -> list[Score]:
    try:
        returned = called(**given)
        return [score_of(returned)] if count is None else scores_of(returned, count)
    except Exception as error:  # noqa: BLE001 - a function that raises costs its group, not the run
        return _failed(f"{type(error).__name__}: {error}"[:_SHOWN], count)
