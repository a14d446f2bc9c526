"""What is found out of an engine on its start weights: that they are the job's, and what an exam shows of its loads.

A part registers the exam (`explorer.exam`). Without it, nothing is examined.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from explorer_hooks.follower.load_results import LoadResults, figures_of
from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.follower.reporter import Reporter
from explorer_hooks.follower.running_engine import RunningEngine
from explorer_hooks.hook import ProbingHook
from explorer_hooks.proof.judgement import UnprovenError, other_start
from explorer_hooks.proof.prover import Prover
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.protocol.engine_state import Proof
from syncd.protocol.layout import Job
from syncd.registered import EXAM, registered
from syncd.transports.base import WeightDirectory

EXAM_OFF = "off"  # what the presence says of an engine that is not to be examined

_ADAPTER = "lora"


class UnfitEngineError(SyncdError):
    """The engine's way of loading does not reach every tensor, so it gets no version."""

    code = "unfit_engine"


class EngineExam(Protocol):
    """Examines one engine each time that it is started. It writes what it finds into the engine's status."""

    def begin(self) -> None:
        """Begin with an engine that is polled for the first time or came back, and end another follower's exam."""

    def opened(self) -> AbstractContextManager[Callable[[], None] | None]:
        """Make the exam of an engine on its start weights; yield what has it taken, None if it is not due."""

    def recall(self) -> None:
        """Take up what an engine of this kind has shown, if this one runs a version already."""

    def examine_adapter(self, directory: WeightDirectory) -> None:
        """Examine an engine of adapters before its first one."""


class StartChecks:
    """Compares one engine with the trainer, and has it examined: once each time that it is started."""

    def __init__(
        self,
        engine: RunningEngine,
        prover: Prover,
        results: LoadResults,
        reporter: Reporter,
        job: Job,
        options: FollowOptions,
    ) -> None:
        self.engine, self.status, self.prover = engine, engine.status, prover
        self.results, self.reporter, self.job, self.options = results, reporter, job, options
        is_own = isinstance(engine.hook, ProbingHook) and engine.hook.is_own
        # Only an engine of another process need show that it can read its start weights again.
        self._tests_reload = options.reload_test and not is_own
        self._is_calibrated = False
        self._exam = _open_exam(self)

    def begin(self) -> None:
        """Begin with an engine that is polled for the first time or came back."""
        self._is_calibrated = False
        self.prover.forget_engine()
        if self._exam is not None:
            self._exam.begin()
        self._examine_and_calibrate()
        if self.status.label is not None:
            with contextlib.suppress(SyncdError, OSError):
                self.prover.recall()
                if self._exam is not None:
                    self._exam.recall()

    def calibrate(self, *, is_examined: bool = False) -> None:
        """Compare the engine with the trainer while it runs its start weights, once there is a baseline."""
        status = self.status
        if self._is_calibrated or not status.is_reachable or status.label is not None:
            return
        try:
            proof = self.prover.calibrate()
        except ConfigError:
            raise
        except OSError:
            return  # the mount fails: the next poll asks again
        except SyncdError as error:
            self.reporter.event("warning", "calibration_failed", reason=str(error), hint=error.hint)
            self._is_calibrated = True
            return
        if proof is not None:
            self._is_calibrated = True
            status.start_problem = None if proof.is_proven else other_start(proof)
            name = "engine_calibrated" if proof.is_proven else "start_model_differs"
            self.reporter.event("info" if proof.is_proven else "warning", name, **figures_of(proof))
            if self._tests_reload and not is_examined:
                self.read_again(self.prover.test_reload)

    def examine_adapters(self, directory: WeightDirectory) -> None:
        """Have an engine of adapters examined before the first one; one that fails gets neither this nor another."""
        if directory.version.kind != _ADAPTER or self._exam is None:
            return
        self._exam.examine_adapter(directory)
        if self.status.unfit is not None:
            raise UnfitEngineError(self.status.unfit.message, hint=self.status.unfit.hint)

    def read_again(self, read: Callable[[], Proof | None]) -> None:
        """Have the engine read its start weights again: that it cannot do so shows before a version needs it."""
        try:
            proof = self._reread(read)
        except ConfigError:
            raise
        except EngineUnreachableError as error:
            self.status.lose(error)
        except SyncdError as error:
            self.reporter.event("error", "reload_test_failed", reason=str(error), hint=error.hint)
        else:
            if proof is not None:
                self.reporter.event("info", "reload_tested", **figures_of(proof))

    def _examine_and_calibrate(self) -> None:
        if not self.status.is_reachable or self.status.label is not None:
            return
        with self._exam.opened() if self._exam is not None else contextlib.nullcontext() as examine:
            self.calibrate(is_examined=examine is not None)
            if examine is not None:
                examine()

    def _reread(self, read: Callable[[], Proof | None]) -> Proof | None:
        """Return the proof that it still runs its start weights; None if that cannot be asked."""
        try:
            return read()
        except UnprovenError as error:
            self.status.mark_wrong(error)
            raise
        except LoadFailedError:
            self.engine.roll_back()
            raise


def _open_exam(checks: StartChecks) -> EngineExam | None:
    """Return the exam that a part registers, None if this installation has none."""
    point = next(iter(registered(EXAM).values()), None)
    if point is not None:
        make: Callable[[StartChecks], EngineExam] = point.load()
        return make(checks)
    if checks.options.exam == "on":
        raise ConfigError("this installation of syncd examines no engine", hint="--exam off")
    checks.status.exam = EXAM_OFF
    return None
