"""The exam in the follower: an engine loads the exam's copy, answers, and is put back."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.hook import Hook, ProbingHook
from explorer_hooks.proof.exam import LABEL, REMEDY, Exam, noise_of
from explorer_hooks.proof.exam_files import ExamFiles, Subject, is_whole
from explorer_hooks.proof.prover import Prover
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError, SyncdError
from syncd.protocol.layout import Job
from syncd.transports.base import WeightDirectory

MOST_LOSSES = 2  # after how often an engine that goes away in exams is not examined any more

_OFF = "off"
_PASSED, _FAILED = "passed", "failed"
_ADAPTERS = frozenset({"lora"})


class Examination:
    """Examines one engine each time that it is started.

    An engine of adapters is examined once its first version says which adapters it will get. Whoever examines an
    engine holds its work, and puts it back afterwards.
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
        self.takes_adapters = hook.kinds == _ADAPTERS
        """Whether the engine loads adapters beside a model that stays."""
        self._losses = 0
        self.unseen: tuple[str, ...] = ()  # the kinds of tensors that it could not see

    def forget(self) -> None:
        """Take the engine for another one: it was started again. One that was lost in exams twice takes no more."""
        if self.result != _OFF and self._losses < MOST_LOSSES:
            self.result, self.unseen, self._prover.is_examined = "", (), False

    def recall(self) -> None:
        """Take up that an engine of this kind has passed, if this one runs a version already."""
        if self.result or self._hook is None or self.takes_adapters:
            return
        unseen = self._files.recall_passed(self._engine(self._hook))
        if unseen is not None:
            self.result, self.unseen, self._prover.is_examined = _PASSED, unseen, True

    def lose(self, error: EngineUnreachableError) -> None:
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self._leave_out(f"it went away in {self._losses} exams: {error}")

    @contextmanager
    def opened(self, version: WeightDirectory | None = None) -> Iterator[tuple[Exam, WeightDirectory] | None]:
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
        begun, noise = time.monotonic(), noise_of(self._prover.noise or 0.0, self._dtype())
        self.unseen = exam.unseen(noise)
        try:
            self._load(copy)
            self._require_all(exam, copy, noise)
        except LoadFailedError:
            if not is_whole(copy):
                self._leave_out("its copy was removed while it was loaded")
                return
            self.result = _FAILED
            raise
        self.result, self._prover.is_examined = _PASSED, True
        if self._hook is not None and not self.takes_adapters:
            self._files.keep_passed(self._engine(self._hook), self.unseen)
        self._reporter.event(
            "info",
            "engine_examined",
            unseen=list(self.unseen),
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
        if not self._prover.is_held and not self.takes_adapters:
            self._hook.commit(copy)

    def _engine(self, hook: ProbingHook) -> str:
        """Return what an exam is bound to: release, flags, dtype and start model."""
        return f"{hook.engine_kind()}, {hook.dtype()}, {hook.start_directory()}"

    def _dtype(self) -> str | None:
        return self._hook.dtype() if self._hook is not None else None

    def _subject(self, version: WeightDirectory | None) -> Subject | None:
        """Return what the engine is examined with; None if it is not to be examined now, or not from here."""
        if self.result or self._hook is None or self.takes_adapters is (version is None):
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
        self.result = reason
        self._reporter.event("warning", "exam_left_out", reason=reason)
