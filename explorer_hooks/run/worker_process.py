"""A process that answers lines of JSON with lines of JSON; bounded, and killed with all that it started.

What it says is not trusted: code of the user, and of a model, runs there and may write to its output too.
"""

import contextlib
import json
import os
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any

from explorer_hooks.hooks.process import end_of, kill_group

_END = 5.0  # seconds that a process has to end once nothing more is asked
_LOOK = 0.2  # seconds between two looks whether a process that does not read is being killed

_PIECE = 1 << 16
_SHOWN = 80

WorkerAnswer = dict[str, Any]
"""What the process answers: a JSON object, with `problem` if something went wrong."""


class WorkerProcess:
    """A process in a session of its own; what it says before it was asked is its first answer.

    Each request has a number that cannot be guessed, and its answer the same one. A process that answers what nobody
    has asked is killed, as is one that writes what is no answer.

    Args:
        most: Bytes of an answer at most.
        environment: All its variables; None for those of this process.
    """

    def __init__(self, argv: Sequence[str], most: int, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the user's own interpreter
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._input, self._most = self._process.stdin, most
        os.set_blocking(self._input.fileno(), False)
        self._lock, self._writing, self._ending = threading.Lock(), threading.Lock(), threading.Lock()
        self.first: Future[WorkerAnswer] = Future()
        self._waiting = {0: self.first}
        self._is_over = self._has_ended = False
        threading.Thread(target=self._read, name="worker", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return not self._is_over and not self._has_ended and self._process.returncode is None

    def ask(self, asked: Mapping[str, Any], seconds: float) -> WorkerAnswer:
        """Return the answer to a request; if there is none in time, the process is killed."""
        end, number = time.monotonic() + seconds, secrets.randbits(52)
        line, answer = _line({"id": number, **asked}), Future[WorkerAnswer]()
        with self._lock:
            if self._has_ended:
                return {"problem": "its process has ended"}
            self._waiting[number] = answer
        try:
            self._write(line, end)
            return answer.result(max(end - time.monotonic(), 0.0))
        except TimeoutError:
            self.kill()
            raise
        except OSError as error:
            return {"problem": f"its process has ended: {error.strerror}"}

    def say(self, said: Mapping[str, Any], seconds: float) -> None:
        """Write what is no request; if it has ended, what waits for its first answer gets to know."""
        with contextlib.suppress(OSError):
            self._write(_line(said), time.monotonic() + seconds)

    def close(self) -> None:
        """Have the process end what it has started; kill it if that takes long."""
        self._hang_up()
        with self._ending:
            if self._process.returncode is None:
                with end_of(self._process) as end:
                    _is_ready(end, select.POLLIN, _END)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its group, also what a process has left that has just ended."""
        self._hang_up()
        with self._ending:
            if self._process.returncode is None:  # nobody has waited for it: the group's number is its own
                kill_group(self._process)

    def _hang_up(self) -> None:
        """Close its input: it learns so that nothing more is asked, and that a signal is meant for it."""
        self._is_over = True
        with self._writing:  # a number of a file that is closed may be another one's at once
            self._input.close()

    def _write(self, line: bytes, until: float) -> None:
        left = memoryview(line)
        with self._writing:
            while left:
                if self._is_over:
                    raise BrokenPipeError(0, "nothing more is asked")
                if time.monotonic() > until:
                    raise TimeoutError
                if _is_ready(self._input.fileno(), select.POLLOUT, _LOOK):
                    left = left[self._input.write(left) or 0 :]

    def _read(self) -> None:
        problem = ""
        try:
            problem = self._hand_over()
        finally:
            self.kill()
            with self._lock:
                self._has_ended, left = True, list(self._waiting.values())
            text = problem or f"its process ended with {self._process.returncode}"
            for waiting in left:
                waiting.set_result({"problem": text})

    def _hand_over(self) -> str:
        """Hand answers to those who wait; return what is wrong with a line that is none, nothing at the end."""
        assert self._process.stdout is not None
        with self._process.stdout as output, end_of(self._process) as end:
            for line in _lines(output, end, self._most):
                answer = _answer(line) if len(line) <= self._most else None
                if answer is None:
                    shown = line[: 2 * _SHOWN].decode("utf-8", "replace").strip()[:_SHOWN]
                    return f"its process wrote something that is no answer: {shown!r}"
                with self._lock:
                    waiting = self._waiting.pop(answer.get("id", 0), None)
                if waiting is None:
                    return "its process answered a question that was not asked"
                waiting.set_result(answer)
        return ""


def _lines(output: IO[bytes], end: int, most: int) -> Iterator[bytes]:
    """Yield lines until the process has ended, also if another one has its output open.

    A line that does not end is yielded once it has more than `most` bytes.
    """
    line = bytearray()
    poll = select.poll()
    for descriptor in (output.fileno(), end):
        poll.register(descriptor, select.POLLIN)
    while output.fileno() in dict(poll.poll()):
        piece = os.read(output.fileno(), _PIECE)
        if not piece:
            return
        *parts, rest = piece.split(b"\n")
        for part in parts:
            yield bytes(line + part)
            line.clear()
        line += rest
        if len(line) > most:
            yield bytes(line)


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """Return whether a file is ready in time; `select` would not take a number from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * seconds))


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _answer(line: bytes) -> WorkerAnswer | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("id", 0), int) else None
