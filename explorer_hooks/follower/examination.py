"""The exam in the follower: an engine on its start weights loads the exam's copy, answers, and is put back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.hook import Hook, ProbingHook
from explorer_hooks.proof.exam import LABEL, REMEDY, Exam, ExamFiles, noise_of
from explorer_hooks.proof.prover import Prover
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError, SyncdError
from syncd.protocol.layout import Job
from syncd.transports.base import WeightDirectory

MOST_LOSSES = 2
"""After how often an engine that goes away in exams is not examined any more."""

_OFF = "off"
_PASSED, _FAILED = "passed", "failed"


class Examination:
    """Examines one engine each time that it is started.

    Whoever examines it holds its work, and restores the start weights afterwards.
    """

    def __init__(
        self, hook: Hook, job: Job, prover: Prover, reporter: Reporter, options: FollowOptions
    ) -> None:
        self._hook = hook if isinstance(hook, ProbingHook) and hook.probes else None
        self._prover, self._reporter, self._files = prover, reporter, ExamFiles(job)
        is_wanted = options.exam == "on" or (
            options.exam == "auto" and self._hook is not None and self._hook.is_own
        )
        self.result = "" if is_wanted else _OFF
        """Passed, failed, off, or why it was not examined; empty before that is known."""
        self._losses = 0
        self.unseen: tuple[str, ...] = ()
        """The kinds of tensors that it could not see."""

    def forget(self) -> None:
        """Take the engine for another one: it was started again. One that was lost in exams twice takes no more."""
        if self.result != _OFF and self._losses < MOST_LOSSES:
            self.result, self.unseen = "", ()

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that the engine went away during an exam."""
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self._leave_out(f"it went away in {self._losses} exams: {error}")

    @contextmanager
    def opened(self) -> Iterator[tuple[Exam, WeightDirectory] | None]:
        """Yield the exam of the engine's start model and its copy, None if there is none to be had."""
        start = self._start()
        if self._hook is None or not start:
            yield None
            return
        opening = self._files.opened(start, self._hook.dtype() or "bfloat16", self._prover.baseline)
        try:
            exam, copy = opening.__enter__()
        except LoadFailedError as error:
            self._leave_out(str(error))
            yield None
            return
        try:
            yield exam, copy
        finally:
            opening.__exit__(None, None, None)

    def is_on_start(self, exam: Exam) -> bool:
        """Return whether the engine runs the exam's start model, by the job's baseline or by transformers."""
        reason = "" if self._prover.calibrated is not None else self._prover.measure(exam.start)
        if reason:
            self._leave_out(f"its start weights do not answer as transformers does: {reason}")
        return not reason

    def can_take(self, copy: WeightDirectory) -> bool:
        """Return whether the engine can load the exam's copy; from then on it has the label of an exam."""
        assert self._hook is not None, "an exam is opened for an engine that answers probes"
        try:
            self._hook.prepare(copy)
            self._hook.mark(LABEL)
        except (RefusedError, ConfigError) as error:
            self._leave_out(str(error))
            return False
        return True

    def take(self, exam: Exam, copy: WeightDirectory) -> None:
        """Have the engine load the copy, and answer.

        Raises:
            LoadFailedError: Its way of loading does not reach every tensor, or it could not load the copy.
            EngineUnreachableError: It does not answer.
        """
        assert self._hook is not None, "an exam is opened for an engine that answers probes"
        begun, noise = time.monotonic(), noise_of(self._prover.noise or 0.0, self._hook.dtype())
        self.unseen = exam.unseen(noise)
        self._hook.load(copy)
        if not self._prover.is_held:
            self._hook.commit(copy)
        problems = [exam.problem(answer, noise) for answer in self._prover.answers(copy, exam.start)]
        if problem := next(filter(None, problems), ""):
            self.result = _FAILED
            raise LoadFailedError(f"it does not load every tensor: {problem}", hint=REMEDY)
        self.result = _PASSED
        self._reporter.event(
            "info",
            "engine_examined",
            unseen=list(self.unseen),
            seconds=round(time.monotonic() - begun, 3),
            made=round(exam.seconds, 3),
            bytes=exam.size,
        )

    def _start(self) -> str:
        """Return the directory of the engine's start model; empty if it is not to be examined, or not from here."""
        if self.result or self._hook is None:
            return ""
        try:
            start = self._hook.start_directory()
        except SyncdError as error:
            self._leave_out(str(error))
            return ""
        if not start:
            self._leave_out("its start weights cannot be read again from a directory of this host")
        return start

    def _leave_out(self, reason: str) -> None:
        self.result = reason
        self._reporter.event("warning", "exam_left_out", reason=reason)
