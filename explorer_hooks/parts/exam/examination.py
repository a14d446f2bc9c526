"""The exam in the follower: an engine loads the exam's copy, answers, and is put back."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from explorer_hooks.follower.start_checks import EXAM_OFF, StartChecks
from explorer_hooks.hook import EXAM_LABEL, ProbingHook
from explorer_hooks.parts.exam.exam import REMEDY, Exam, noise_of
from explorer_hooks.parts.exam.files import ExamFiles, Subject, is_whole
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError, SyncdError
from syncd.transports.base import WeightDirectory

MOST_LOSSES = 2  # after how often an engine that goes away in exams is not examined any more

_PASSED, _FAILED = "passed", "failed"
_ADAPTERS = frozenset({"lora"})


class Examination:
    """Examines one engine each time that it is started.

    An engine of adapters is examined once its first version says which adapters it will get. Whoever examines an
    engine holds its work, and puts it back afterwards.
    """

    def __init__(self, checks: StartChecks) -> None:
        self._checks, self._engine, self._status = checks, checks.engine, checks.status
        self._prover, self._reporter, self._files = checks.prover, checks.reporter, ExamFiles(checks.job)
        hook, wanted = checks.engine.hook, checks.options.exam
        self._hook = hook if isinstance(hook, ProbingHook) and hook.probes else None
        is_wanted = wanted == "on" or (wanted == "auto" and self._hook is not None and self._hook.is_own)
        self._status.exam = "" if is_wanted else EXAM_OFF
        self._takes_adapters = hook.kinds == _ADAPTERS
        """Whether the engine loads adapters beside a model that stays."""
        self._losses = 0

    def begin(self) -> None:
        """Begin with an engine that is polled for the first time or came back, and end another follower's exam."""
        status = self._status
        if status.label is None or status.label == EXAM_LABEL:
            self._forget()
            status.unfit = None
        if status.label == EXAM_LABEL:
            self._end_exam()

    @contextmanager
    def opened(self) -> Iterator[Callable[[], None] | None]:
        """Make the exam of an engine on its start weights; yield what has it taken, None if it is not due."""
        with self._made() as made:
            yield partial(self._examine, *made) if made is not None else None

    def recall(self) -> None:
        """Take up that an engine of this kind has passed, if this one runs a version already."""
        status = self._status
        if status.exam or self._hook is None or self._takes_adapters:
            return
        unseen = self._files.recall_passed(self._kind(self._hook))
        if unseen is not None:
            status.exam, status.unseen, self._prover.is_examined = _PASSED, unseen, True

    def examine_adapter(self, directory: WeightDirectory) -> None:
        """Examine an engine of adapters before its first one."""
        with self._made(directory) as made:
            if made is not None:
                self._examine(*made)

    def _forget(self) -> None:
        """Take the engine for another one: it was started again. One that was lost in exams twice takes no more."""
        status = self._status
        if status.exam != EXAM_OFF and self._losses < MOST_LOSSES:
            status.exam, status.unseen, self._prover.is_examined = "", (), False

    def _end_exam(self) -> None:
        """Put an engine back on its start weights that another follower has left in an exam."""
        hook = self._engine.hook
        try:
            if isinstance(hook, ProbingHook) and hook.end_exam():
                self._status.is_suspect = False
                reason = "its follower ended while it was examined"
                self._reporter.event("warning", "exam_ended", reason=reason)
        except EngineUnreachableError as error:
            self._status.lose(error)
            return
        except SyncdError as error:
            self._reporter.event("error", "exam_failed", reason=str(error), hint=error.hint)
        self._engine.ask()

    @contextmanager
    def _made(self, version: WeightDirectory | None = None) -> Iterator[tuple[Exam, WeightDirectory] | None]:
        """Yield the exam and its copy, None if there is none; `version`: the adapter that is about to be loaded."""
        subject, hook = self._subject(version), self._hook
        with contextlib.ExitStack() as stack:
            opened = None
            if subject is not None and hook is not None:
                try:
                    dtype, baseline = hook.dtype() or "bfloat16", self._prover.baseline
                    opened = stack.enter_context(self._files.opened(subject, dtype, baseline))
                except (SyncdError, OSError) as error:
                    self._leave_out(str(error))
            yield opened

    def _examine(self, exam: Exam, copy: WeightDirectory) -> None:
        """Have it load the exam's copy, which nobody is answered from, and put it back."""
        if self._status.start_problem is not None or not self._can_examine(exam, copy):
            return
        self._status.is_examined = True
        self._checks.results.publish()
        try:
            self._take(exam, copy)
        except EngineUnreachableError as error:
            self._lose(error)
        except SyncdError as error:
            self._status.unfit = LoadFailedError(error.message, hint=error.hint)
            self._reporter.event("error", "exam_failed", reason=str(error), hint=error.hint)
        finally:
            self._checks.read_again(self._prover.end_exam)
            self._status.is_examined = False
        self._engine.ask()

    def _can_examine(self, exam: Exam, copy: WeightDirectory) -> bool:
        try:
            return self._is_on_start(exam) and self._can_take(copy)
        except EngineUnreachableError as error:
            self._lose(error)
        except SyncdError as error:
            self._reporter.event("warning", "exam_left_out", reason=str(error))
        return False

    def _lose(self, error: EngineUnreachableError) -> None:
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self._leave_out(f"it went away in {self._losses} exams: {error}")
        self._status.lose(error)

    def _is_on_start(self, exam: Exam) -> bool:
        """Return whether the engine runs the exam's start model, by the job's baseline or by transformers."""
        reason = "" if self._prover.calibrated is not None else self._prover.measure(exam.start)
        if reason:
            self._leave_out(f"its start weights do not answer as transformers does: {reason}")
        return not reason

    def _can_take(self, copy: WeightDirectory) -> bool:
        """Return whether the engine can load the exam's copy; from then on it has the label of an exam."""
        assert self._hook is not None, "an exam is opened for an engine that answers probes"
        try:
            self._hook.prepare(copy)
            self._hook.mark(EXAM_LABEL)
        except (RefusedError, ConfigError) as error:
            self._leave_out(str(error))
            return False
        return True

    def _take(self, exam: Exam, copy: WeightDirectory) -> None:
        """Have the engine load the copy, and answer.

        Raises:
            LoadFailedError: Its way of loading does not reach every tensor, or it could not load the copy.
            EngineUnreachableError: It does not answer.
        """
        begun, noise, status = time.monotonic(), self._noise(), self._status
        status.unseen = exam.unseen(noise)
        try:
            self._load(copy)
            self._require_all(exam, copy, noise)
        except LoadFailedError:
            if not is_whole(copy):
                self._leave_out("its copy was removed while it was loaded")
                return
            status.exam = _FAILED
            raise
        status.exam, self._prover.is_examined = _PASSED, True
        if self._hook is not None and not self._takes_adapters:
            self._files.keep_passed(self._kind(self._hook), status.unseen)
        self._reporter.event(
            "info",
            "engine_examined",
            unseen=list(status.unseen),
            seconds=round(time.monotonic() - begun, 3),
            made=round(exam.seconds, 3),
            bytes=exam.size,
        )

    def _require_all(self, exam: Exam, copy: WeightDirectory, noise: float) -> None:
        problems = [exam.problem(answer, noise) for answer in self._prover.answers(copy, exam.start)]
        if problem := next(filter(None, problems), ""):
            raise LoadFailedError(f"it does not load every tensor: {problem}", hint=REMEDY)

    def _load(self, copy: WeightDirectory) -> None:
        assert self._hook is not None, "an exam is opened for an engine that answers probes"
        self._hook.load(copy)
        # A server answers under an adapter's name at once, and a commit would withdraw the others.
        if not self._prover.is_held and not self._takes_adapters:
            self._hook.commit(copy)

    def _kind(self, hook: ProbingHook) -> str:
        """Return what an exam is bound to: release, flags, dtype and start model."""
        return f"{hook.engine_kind()}, {hook.dtype()}, {hook.start_directory()}"

    def _noise(self) -> float:
        dtype = self._hook.dtype() if self._hook is not None else None
        return noise_of(self._prover.noise or 0.0, dtype)

    def _subject(self, version: WeightDirectory | None) -> Subject | None:
        """Return what the engine is examined with; None if it is not to be examined now, or not from here."""
        if self._status.exam or self._hook is None or self._takes_adapters is (version is None):
            return None
        try:
            start = self._hook.start_directory()
        except SyncdError as error:
            self._leave_out(str(error))
            return None
        if not start:
            self._leave_out("its start weights cannot be read again from a directory of this host")
            return None
        return Subject(start, version.path if version is not None else "")

    def _leave_out(self, reason: str) -> None:
        self._status.exam = reason
        self._reporter.event("warning", "exam_left_out", reason=reason)
