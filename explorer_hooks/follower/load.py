"""One version into one engine, and the engine back on its feet where that fails."""

from typing import TYPE_CHECKING

from explorer_hooks.follower.checks import check_fit
from explorer_hooks.follower.engine import Engine
from explorer_hooks.follower.fetch import Placed
from explorer_hooks.follower.timing import Timings
from explorer_hooks.hook import Running
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.transports.base import WeightDirectory

if TYPE_CHECKING:
    from syncd.transports.tensors import Tensors

_WHOLE = "weights"


class Loading:
    """Loads versions into an engine, and remembers the last good one.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._hook = engine, engine.hook
        self.good: Placed | None = None
        """What the engine can go back to."""
        self._reference: Tensors | None = None
        """What the first version that was applied consists of: each further one has just these tensors."""

    def keep(self, placed: Placed) -> None:
        """Make a version the one to go back to; the one before is let go."""
        before, self.good = self.good, placed
        target = placed.target
        if self._reference is None and target.version.kind == _WHOLE and target.tensors:
            self._reference = target.tensors
        if before is not None and before is not placed:
            before.close()

    def close(self) -> None:
        """Let go of the last good version."""
        good, self.good = self.good, None
        if good is not None:
            good.close()

    def prepare(self, target: WeightDirectory, timings: Timings) -> None:
        """Do all that can be done before the engine is touched.

        Raises:
            RefusedError: The version does not fit.
            EngineUnreachableError: The engine does not answer.
            LoadFailedError: The hook failed.
        """
        with timings.part("prepare"):
            try:
                self._check_fit(target)
                self._hook.prepare(target)
            except SyncdError:
                raise
            except Exception as error:
                raise _failed("prepare", error) from error

    def load(self, placed: Placed, timings: Timings) -> None:
        """Load a version and have the engine confirm it; whatever the way out, the engine is not left half loaded.

        Raises:
            LoadFailedError: It could not be loaded; the engine is back on what it ran, or has gone.
            EngineDeadError: It cannot be brought back.
        """
        try:
            with timings.part("load"):
                self._hook.load(placed.target)
                self._hook.commit(placed.target)
            with timings.part("confirm"):
                running = self._hook.current_version()
                _check_confirmed(placed.target, running)
        except EngineDeadError as error:
            self._engine.die(error)
            raise
        except Exception as error:
            self.recover()
            raise _failed("load", error) from error
        except BaseException:
            self.recover()
            raise
        self._engine.is_suspect = False
        self._engine.believe(running)

    def recover(self) -> None:
        """Bring the engine back to the last good version, and ask it what it runs then.

        An engine that has gone meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version was removed while this process was stopped for too long, or is damaged: the newest may still
        save it.

        Raises:
            EngineDeadError: It cannot be brought back.
        """
        self._engine.is_suspect = True
        if self.good is not None and not self.good.is_usable():
            self.close()
            self._engine.ask()
            return
        try:
            self._hook.abort(self.good.target if self.good else None)
        except EngineUnreachableError as error:
            self._engine.lose(error)
        except Exception as error:
            dead = error if isinstance(error, EngineDeadError) else _dead(error)
            self._engine.die(dead)
            raise dead from error
        else:
            self._engine.is_suspect = False
            self._engine.ask()

    def _check_fit(self, target: WeightDirectory) -> None:
        if target.version.kind != _WHOLE or not target.tensors:
            return
        runs = self._hook.tensors() or self._reference
        if runs:
            check_fit(target.tensors, runs)


def _check_confirmed(target: WeightDirectory, running: Running) -> None:
    if running.label != target.label:
        raise LoadFailedError(
            f"the engine was given {target.label} and says that it runs {running.label}",
            hint="an engine says the label that it was given, whole",
        )
    if running.paused:
        raise LoadFailedError(f"the engine was given {target.label} and takes no work")


def _failed(what: str, error: Exception) -> LoadFailedError:
    if isinstance(error, LoadFailedError):
        return error
    if isinstance(error, EngineUnreachableError):
        return LoadFailedError(f"the engine went away during {what}: {error}", hint=error.hint)
    if isinstance(error, SyncdError):
        return LoadFailedError(error.message, path=error.path, hint=error.hint)
    # A hook may be anybody's own code.
    return LoadFailedError(f"{what} failed: {type(error).__name__}: {error}")


def _dead(error: Exception) -> EngineDeadError:
    return EngineDeadError(f"it cannot be brought back: {error}", hint="restart the engine")
