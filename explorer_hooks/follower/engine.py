"""One engine behind its hook: what it runs, loading a version into it, and restoring it if that fails."""

from typing import TYPE_CHECKING

from explorer_hooks.follower.versions import KnownVersions
from explorer_hooks.hook import Hook, Running
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError, SyncdError
from syncd.protocol.disk import Clock
from syncd.transports.base import WeightDirectory
from syncd.transports.filesystem.directory import HeldDirectory, LoadTimings
from syncd.transports.tensors import Tensors, compare, require_fit

if TYPE_CHECKING:
    from syncd.protocol.version import Pair

_WHOLE = "weights"
_SOONEST = 0.2
"""Seconds before an engine that did not answer is polled again; doubled each time, up to the usual interval."""


class Engine:
    """One engine behind its hook.

    Args:
        hook: The hook.
        clock: This host's clock.
        every: Seconds between two polls.
        versions: The versions of the job.
    """

    def __init__(self, hook: Hook, clock: Clock, every: float, versions: KnownVersions) -> None:
        self._hook, self._clock, self._every, self._versions = hook, clock, every, versions
        self.applied: Pair | None = None
        self.label: str | None = None
        self.is_reachable = False
        self.is_suspect = False
        """Whether it may be half loaded: it was left paused, or went away during a load."""
        self.reason = ""
        self.dead: EngineDeadError | None = None
        self.good: HeldDirectory | None = None
        """The last good version, which a failed load restores."""
        self._reference: Tensors | None = None
        """The tensors of the first version that was applied: each further version has the same ones."""
        self._next, self._pause = float("-inf"), _SOONEST

    @property
    def is_due(self) -> bool:
        """Return whether it is time to poll the engine."""
        return self._clock.monotonic() >= self._next

    @property
    def is_known(self) -> bool:
        """Return whether it runs a version of the job, or its start model."""
        return self.applied is not None or self.label is None

    def running(self) -> Running:
        """Return what the engine says that it runs. Any thread may call this.

        Raises:
            EngineUnreachableError: The engine does not answer.
        """
        return self._hook.current_version()

    def poll(self) -> None:
        """Read from the engine what it runs."""
        try:
            running = self.running()
        except EngineUnreachableError as error:
            self.lose(error)
        else:
            self._update(running)

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that it does not answer: what it runs is unknown until it does."""
        self.applied, self.is_reachable, self.reason = None, False, str(error)
        self.dead = None  # the process that answers next is another one, or is polled again
        self._next = self._clock.monotonic() + min(self._pause, self._every)
        self._pause *= 2

    def die(self, error: EngineDeadError) -> None:
        """Note that it cannot be restored."""
        error.hint = error.hint or "restart the engine"
        self.applied, self.reason, self.dead = None, str(error), error

    def keep(self, held: HeldDirectory) -> None:
        """Make a version the one to restore; the previous one is given up."""
        held.keep_durable()
        before, self.good = self.good, held
        directory = held.directory
        if self._reference is None and directory.version.kind == _WHOLE and directory.tensors:
            self._reference = directory.tensors
        if before is not None and before is not held:
            before.close()

    def release(self) -> None:
        """Give up the last good version."""
        good, self.good = self.good, None
        if good is not None:
            good.close()

    def close(self) -> None:
        """Give up the last good version and close the hook; the engine keeps running."""
        self.release()
        self._hook.close()

    def prepare(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        """Do everything that needs no change of the engine.

        Raises:
            RefusedError: The version does not fit.
            EngineUnreachableError: The engine does not answer.
            LoadFailedError: The hook failed.
        """
        with timings.part("prepare"):
            try:
                self._require_fit(directory)
                self._hook.prepare(directory)
            except SyncdError:
                raise
            except Exception as error:
                raise _load_failure("prepare", error) from error

    def load(self, directory: WeightDirectory, timings: LoadTimings) -> None:
        """Load a version and have the engine confirm it; if anything fails, the engine is restored.

        Raises:
            LoadFailedError: It could not be loaded; the engine runs what it ran before, or went away.
            EngineDeadError: It cannot be restored.
        """
        try:
            with timings.part("load"):
                self._hook.load(directory)
                self._hook.commit(directory)
            with timings.part("confirm"):
                running = self.running()
                _require_confirmed(directory, running)
        except EngineDeadError as error:
            self.die(error)
            raise
        except Exception as error:
            self.restore()
            raise _load_failure("load", error) from error
        except BaseException:
            self.restore()
            raise
        self.is_suspect = False
        self._update(running)

    def restore(self) -> None:
        """Put the engine back on the last good version, and read from it what it runs then.

        An engine that went away meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version is damaged, or was removed while this process was stopped for too long: the newest version may
        still save it.

        Raises:
            EngineDeadError: It cannot be restored.
        """
        self.is_suspect = True
        if self.good is not None and not self.good.is_usable():
            self.release()
            self.poll()
            return
        try:
            self._hook.abort(self.good.directory if self.good else None)
        except EngineUnreachableError as error:
            self.lose(error)
        except Exception as error:
            lost = EngineDeadError(f"it cannot be restored: {error}")
            dead = error if isinstance(error, EngineDeadError) else lost
            self.die(dead)
            raise dead from error
        else:
            self.is_suspect = False
            self.poll()

    def _update(self, running: Running) -> None:
        if self.dead is not None and running.label != self.label:
            self.dead = None  # it was restarted
        self.label, self.reason, self.is_reachable = running.label, "", True
        self.applied = self._versions.pair_of_label(running.label) if self.dead is None else None
        self.is_suspect = self.is_suspect or running.paused
        self._next, self._pause = self._clock.monotonic() + self._every, _SOONEST

    def _require_fit(self, directory: WeightDirectory) -> None:
        if directory.version.kind != _WHOLE or not directory.tensors:
            return
        if held := self._hook.tensors() or self._reference:
            require_fit(compare(held, {}, directory.tensors, cast=False), "it does not fit the engine")


def _require_confirmed(directory: WeightDirectory, running: Running) -> None:
    if running.label != directory.label:
        raise LoadFailedError(
            f"the engine was given {directory.label} and says that it runs {running.label}",
            hint="an engine must report the whole label that it was given",
        )
    if running.paused:
        raise LoadFailedError(f"the engine was given {directory.label} and takes no work")


def _load_failure(what: str, error: Exception) -> LoadFailedError:
    if isinstance(error, LoadFailedError):
        return error
    if isinstance(error, EngineUnreachableError):
        return LoadFailedError(f"the engine went away during {what}: {error}", hint=error.hint)
    if isinstance(error, SyncdError):
        return LoadFailedError(error.message, path=error.path, hint=error.hint)
    # A hook may be the user's own code.
    return LoadFailedError(f"{what} failed: {type(error).__name__}: {error}")
