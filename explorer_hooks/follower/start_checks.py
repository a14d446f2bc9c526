"""What is found out of an engine on its start weights: that they are the job's, and that loads reach every tensor."""

import contextlib
from collections.abc import Callable

from explorer_hooks.follower.examination import Examination
from explorer_hooks.follower.load_results import LoadResults, figures_of
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.running_engine import RunningEngine
from explorer_hooks.hook import ProbingHook
from explorer_hooks.proof.exam import LABEL, Exam
from explorer_hooks.proof.judgement import UnprovenError, other_start
from explorer_hooks.proof.prover import Prover
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.protocol.engine_state import Proof
from syncd.transports.base import WeightDirectory

_ADAPTER = "lora"


class UnfitEngineError(SyncdError):
    """The engine's way of loading does not reach every tensor, so it gets no version."""

    code = "unfit_engine"


class StartChecks:
    """Compares one engine with the trainer, and examines it: once each time that it is started.

    Args:
        tests_reload: Whether it reads its start weights again, which only an engine of another process need show.
    """

    def __init__(
        self,
        engine: RunningEngine,
        prover: Prover,
        examination: Examination,
        results: LoadResults,
        reporter: Reporter,
        *,
        tests_reload: bool,
    ) -> None:
        self._engine, self._status, self._prover = engine, engine.status, prover
        self._examination, self._results, self._reporter = examination, results, reporter
        is_own = isinstance(engine.hook, ProbingHook) and engine.hook.is_own
        self._tests_reload = tests_reload and not is_own
        self._is_calibrated = False

    def begin(self) -> None:
        """Begin with an engine that is polled for the first time or came back."""
        status = self._status
        self._is_calibrated = False
        self._prover.forget_engine()
        if status.label is None or status.label == LABEL:
            self._examination.forget()
            status.unfit = None
        if status.label == LABEL:
            self._end_exam()
        self._examine_and_calibrate()
        if status.label is not None:
            with contextlib.suppress(SyncdError, OSError):
                self._prover.recall()
                self._examination.recall()

    def calibrate(self, *, is_examined: bool = False) -> None:
        """Compare the engine with the trainer while it runs its start weights, once there is a baseline."""
        status = self._status
        if self._is_calibrated or not status.is_reachable or status.label is not None:
            return
        try:
            proof = self._prover.calibrate()
        except ConfigError:
            raise
        except OSError:
            return  # the mount fails: the next poll asks again
        except SyncdError as error:
            self._reporter.event("warning", "calibration_failed", reason=str(error), hint=error.hint)
            self._is_calibrated = True
            return
        if proof is not None:
            self._is_calibrated = True
            status.start_problem = None if proof.is_proven else other_start(proof)
            name = "engine_calibrated" if proof.is_proven else "start_model_differs"
            self._reporter.event("info" if proof.is_proven else "warning", name, **figures_of(proof))
            if self._tests_reload and not is_examined:
                self._read_again(self._prover.test_reload)

    def examine_adapters(self, directory: WeightDirectory) -> None:
        """Examine an engine of adapters before the first one; one that fails gets neither this nor another."""
        if directory.version.kind != _ADAPTER:
            return
        with self._examination.opened(directory) as exam:
            if exam is not None:
                self._examine(*exam)
        if self._status.unfit is not None:
            raise UnfitEngineError(self._status.unfit.message, hint=self._status.unfit.hint)

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

    def _examine_and_calibrate(self) -> None:
        if not self._status.is_reachable or self._status.label is not None:
            return
        with self._examination.opened() as exam:
            self.calibrate(is_examined=exam is not None)
            if exam is not None:
                self._examine(*exam)

    def _examine(self, exam: Exam, copy: WeightDirectory) -> None:
        """Have it load the exam's copy, which nobody is answered from, and put it back."""
        if self._status.start_problem is not None or not self._can_examine(exam, copy):
            return
        self._status.is_examined = True
        self._results.publish()
        try:
            self._examination.take(exam, copy)
        except EngineUnreachableError as error:
            self._lose(error)
        except SyncdError as error:
            self._status.unfit = LoadFailedError(error.message, hint=error.hint)
            self._reporter.event("error", "exam_failed", reason=str(error), hint=error.hint)
        finally:
            self._read_again(self._prover.end_exam)
            self._status.is_examined = False
        self._engine.ask()

    def _can_examine(self, exam: Exam, copy: WeightDirectory) -> bool:
        try:
            return self._examination.is_on_start(exam) and self._examination.can_take(copy)
        except EngineUnreachableError as error:
            self._lose(error)
        except SyncdError as error:
            self._reporter.event("warning", "exam_left_out", reason=str(error))
        return False

    def _lose(self, error: EngineUnreachableError) -> None:
        self._examination.lose(error)
        self._status.lose(error)

    def _read_again(self, read: Callable[[], Proof | None]) -> None:
        """Have the engine read its start weights again: that it cannot do so shows before a version needs it."""
        try:
            proof = self._reread(read)
        except ConfigError:
            raise
        except EngineUnreachableError as error:
            self._status.lose(error)
        except SyncdError as error:
            self._reporter.event("error", "reload_test_failed", reason=str(error), hint=error.hint)
        else:
            if proof is not None:
                self._reporter.event("info", "reload_tested", **figures_of(proof))

    def _reread(self, read: Callable[[], Proof | None]) -> Proof | None:
        """Return the proof that it still runs its start weights; None if that cannot be asked."""
        try:
            return read()
        except UnprovenError as error:
            self._status.mark_wrong(error)
            raise
        except LoadFailedError:
            self._engine.roll_back()
            raise
