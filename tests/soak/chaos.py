"""Carries a schedule out, and takes down what was really done and from when to when."""

import contextlib
import heapq
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from soak.judging import Disturbance
from soak.parts import Part
from soak.schedule import Act

_BLOCK = 1 << 16
_PATIENCE = 30.0
_CUT = f"{os.path.dirname(os.path.abspath(__file__))}/cut.py"


@dataclass(order=True)
class _Due:
    """Something to do: what a schedule says, or its undoing."""

    at: float
    number: int
    work: Callable[[], None] = field(compare=False)
    undoes: bool = field(compare=False, default=False)


class Chaos:
    """Does what a schedule says.

    Args:
        acts: The schedule.
        parts: By name.
        job: The job directory.
        point: Where its file system is mounted.
        rewind: Told by how many steps the trainer's next start goes back.
    """

    def __init__(
        self,
        acts: Sequence[Act],
        parts: Mapping[str, Part],
        job: str,
        point: str,
        rewind: Callable[[int], None],
    ) -> None:
        self._acts, self._parts, self._job, self._point, self._rewind = acts, parts, job, point, rewind
        self._halt, self._began, self._numbers = threading.Event(), 0.0, itertools.count()
        self._queue: list[_Due] = []
        self.done: Counter[str] = Counter()
        self.disturbances: list[Disturbance] = []
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Undo what is still done, and stop."""
        self._halt.set()
        self._thread.join(2 * _PATIENCE)

    def _run(self) -> None:
        self._began = time.monotonic()
        for act in self._acts:
            self._plan(act.at, lambda act=act: self._begin(act))
        while self._queue:
            due = self._queue[0]
            if self._halt.wait(max(0.0, self._began + due.at - time.monotonic())):
                break
            heapq.heappop(self._queue)
            self._safely(due.work)
        for due in sorted(self._queue):
            if due.undoes:
                self._safely(due.work)

    def _plan(self, at: float, work: Callable[[], None], *, undoes: bool = False) -> None:
        heapq.heappush(self._queue, _Due(at, next(self._numbers), work, undoes))

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, subprocess.SubprocessError) as error:
            self.wrong.append(f"the harness could not disturb: {error!r}")

    def _begin(self, act: Act) -> None:
        undo = self._do(act)
        if undo is None:
            return
        self.done[act.kind] += 1
        began = time.monotonic()

        def over() -> None:
            undo()
            self.disturbances.append(Disturbance(act.kind, act.who, began, time.monotonic()))

        self._plan(began - self._began + act.lasts, over, undoes=True)

    def _do(self, act: Act) -> Callable[[], None] | None:
        """Do it; return what undoes it, None where there was nobody to do it to."""
        if act.kind == "fill":
            return self._fill()
        if act.kind == "freeze":
            return self._freeze()
        part = self._parts[act.who]
        if act.kind == "cut":
            return self._cut(part, act.lasts)
        if act.kind == "stop":
            return (lambda: part.send(signal.SIGCONT)) if part.send(signal.SIGSTOP) else None
        if act.kind == "rewind":
            self._rewind(act.back)
        kills = act.kind == "kill" or (act.kind == "rewind" and act.back == 1)
        return _nothing if part.send(signal.SIGKILL if kills else signal.SIGTERM) else None

    def _fill(self) -> Callable[[], None]:
        path = f"{self._point}/filler"
        with open(path, "wb", buffering=0) as file:
            for size in (_BLOCK, 4096):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size) == size:
                        pass
        return lambda: os.unlink(path)

    def _freeze(self) -> Callable[[], None]:
        _run("fsfreeze", "--freeze", self._point)
        return lambda: _run("fsfreeze", "--unfreeze", self._point)

    def _cut(self, part: Part, seconds: float) -> Callable[[], None] | None:
        if part.pid is None:
            return None
        command = [sys.executable, _CUT, str(part.pid), self._job, str(seconds)]
        cutting = subprocess.Popen(command, stderr=subprocess.PIPE, env=part.environment)
        return lambda: self._heal(cutting, part)

    def _heal(self, cutting: "subprocess.Popen[bytes]", part: Part) -> None:
        try:
            said = cutting.communicate(timeout=_PATIENCE)[1].decode()
        except subprocess.TimeoutExpired:
            cutting.kill()
            said = f"it did not end: {cutting.communicate()[1]!r}"
        # Who had ended meanwhile, or was just starting, has no such namespace any more, or none yet.
        if cutting.returncode and "No such" not in said:
            self.wrong.append(f"the harness could not cut {part.name} off: {said.strip()[-300:]}")


def _nothing() -> None:
    pass


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_PATIENCE, capture_output=True)
