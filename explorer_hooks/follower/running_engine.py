"""One inference engine: what it says that it runs, whether it proves that, and the version that restores it."""

import contextlib

from explorer_hooks.follower.engine_status import EngineStatus
from explorer_hooks.follower.versions import Fetcher
from explorer_hooks.hook import Hook, Running
from explorer_hooks.proof.judgement import UnprovenError
from explorer_hooks.proof.prover import Prover
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError
from syncd.protocol.disk import Clock
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.files.leased_directory import HeldDirectory

WHOLE = "weights"  # the kind of a version that is all tensors of a model

_ASKS = 4
_ASK_PAUSE = 0.1
"""How often an engine is asked at once what it runs if its connection was lost in a load, and seconds in between."""


class RunningEngine:
    """Asks the engine behind a hook, has it prove its answers, and rolls it back."""

    def __init__(
        self, hook: Hook, status: EngineStatus, fetcher: Fetcher, prover: Prover, clock: Clock
    ) -> None:
        self.hook, self.status = hook, status
        self._fetcher, self._prover, self._clock = fetcher, prover, clock
        self.good: HeldDirectory | None = None  # the last good version, which a failed load restores
        self.first_whole: WeightDirectory | None = None  # all further versions have the same tensors

    def running(self) -> Running:
        """Return what the engine says that it runs. Any thread may call this."""
        return self.hook.current_version()

    def ask(self) -> None:
        """Read from the engine what it runs into its status."""
        try:
            running = self.running()
        except EngineUnreachableError as error:
            self.status.lose(error)
        else:
            self.status.answered(running)

    def ask_again(self) -> Running:
        """Return what it says that it runs, asked a few times if its connection is lost again."""
        for _ in range(_ASKS - 1):
            with contextlib.suppress(EngineUnreachableError):
                return self.running()
            self._clock.sleep(_ASK_PAUSE)
        return self.running()

    def good_if_running(self) -> WeightDirectory | None:
        """Return the last good version if that is what it runs."""
        good, status = self.good.directory if self.good else None, self.status
        return good if good is not None and good.label == status.label and not status.is_suspect else None

    def prove(self, weights: WeightDirectory | WeightTensors, *, again: bool = False) -> None:
        """Have it prove a version that it says it runs; if it cannot, it is wrong until another version is loaded."""
        status = self.status
        try:
            if self._prover.can_prove(weights):
                status.unproven.begin(weights.label)
            status.is_proven = self._prover.prove(weights, again=again) is not None
            status.unproven.end(is_proven=True)
        except EngineUnreachableError as error:
            status.unproven.end(is_proven=False)
            status.lose(error)
        except LoadFailedError as error:
            status.unproven.end(is_proven=False)
            status.mark_wrong(error)

    def roll_back(self) -> None:
        """Put the engine back on the last good version, and read from it what it runs then.

        An engine that went away meanwhile counts as half loaded until it is loaded again. So does one whose last
        good version is damaged, or was removed while this process was stopped for too long: the newest version may
        still save it.
        """
        status = self.status
        status.is_suspect = True
        status.unproven.end(is_proven=False)
        if self.good is not None and not self.good.is_usable():
            self.release()
            self.ask()
            return
        try:
            self.hook.abort(self.good.directory if self.good else None)
        except EngineUnreachableError as error:
            status.lose(error)
        except Exception as error:
            lost = EngineDeadError(f"it cannot be restored: {error}")
            dead = error if isinstance(error, EngineDeadError) else lost
            status.die(dead)
            raise dead from error
        else:
            status.is_suspect, status.wrong = False, None
            self.ask()
            if self.good is not None and status.is_reachable:
                self.prove(self.good.directory)

    def leave_unproven(self, error: UnprovenError) -> None:
        """Go back to the last good version; without one it stays as it is, and is given no work."""
        if self.good is not None:
            self.roll_back()
            return
        self.status.unproven.end(is_proven=False)
        self.ask()
        self.status.mark_wrong(error)

    def keep_running(self, pair: Pair) -> None:
        """Keep the files of the version that the engine runs already, and have it prove that."""
        held = self._fetcher.fetch_running(pair)
        if held is not None:
            self.keep(held)
            self.prove(held.directory)

    def keep(self, held: HeldDirectory) -> None:
        """Keep a version as the last good one."""
        held.keep_durable()
        before, self.good = self.good, held
        directory = held.directory
        if self.first_whole is None and directory.version.kind == WHOLE and directory.tensors:
            self.first_whole = directory
        if before is not None and before is not held:
            before.close()

    def release(self) -> None:
        """Give up the last good version."""
        good, self.good = self.good, None
        if good is not None:
            good.close()
