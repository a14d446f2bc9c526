"""Which version the engine runs, whether it may be given work, and bringing it to the next version."""

import time
from collections.abc import Callable, Mapping

from explorer_hooks.follower.follower import TurnOutcome
from explorer_hooks.hook import Unproven
from explorer_hooks.run import pacing
from explorer_hooks.run.generation import BEFORE_THE_FIRST
from explorer_hooks.run.held_out import VersionWatcher
from explorer_hooks.run.pacing import Allowance
from explorer_hooks.run.weight_sources import PIECE, WeightSource, storage_errors_pass
from syncd.client.sync_policy import SyncStyle
from syncd.errors import EngineDeadError
from syncd.jobfile.model import JobFile
from syncd.jobfile.sections import SyncSection
from syncd.protocol.job_end import LAST
from syncd.protocol.version import Pair

BREATH = 0.05  # seconds between two asks that are answered at once

_POLL = 0.25
"""Seconds between two polls for a version: while groups are being generated, and for the last one."""


class EngineVersions:
    """Which version is published and which one the engine runs, and how many batches may still be written."""

    def __init__(self, source: WeightSource, batches: Callable[[], int], file: JobFile) -> None:
        self.source, self._batches = source, batches
        self.synced_at = batches()
        self._progressed_at = time.monotonic()
        self._published: Pair | None = None
        self._written = 0  # batches of all explorers, as the storage said last
        # Counted from the very beginning: an explorer that joins later has no separate allowance.
        self._allowance = Allowance(0, 0, file.data.groups / file.explorer_groups, pacing.ahead_of(file))

    def permitted(self) -> Pair | None:
        """Return the version with which work may be done, None while the engine has none. Any thread may ask."""
        runs = self.source.runs
        if runs is not None:
            return runs
        # An engine that runs no version runs what it was started with, which counts only before the first version.
        return BEFORE_THE_FIRST if self._published is None else None

    @property
    def digest(self) -> str:
        """Return the digest of the weights that the engine runs, empty if it runs no version."""
        return self.source.client.confirmed_digest if self.source.runs is not None else ""

    def is_ready(self) -> bool:
        """Return whether the engine runs a published version, or before the first one what it was started with."""
        self._read_newest()
        return self.source.may_work() and self.permitted() is not None

    def update(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        outcome = TurnOutcome("nothing")
        with storage_errors_pass():
            outcome = self.source.update(timeout, ask=ask)
        if outcome.kind == "applied":
            self.mark_synced()
            self._read_newest()
        return outcome

    def mark_synced(self) -> None:
        self.synced_at = self._batches()

    def room(self) -> int:
        """Return how many further batches the trainer needs now."""
        return self._allowance.room(self._step, self._count_written())

    def renew_allowance(self, patience: float) -> bool:
        """Allow further batches if no version came for long, and return whether that is so.

        A living trainer that publishes none has dropped some batches, and waits for others.
        """
        is_due = time.monotonic() - self._progressed_at > patience
        if is_due:
            self._progressed_at = time.monotonic()
            self.mark_synced()
            self._restart_allowance()
        return is_due

    def _restart_allowance(self) -> None:
        self._allowance = self._allowance.restarted(self._step, self._count_written())

    def _count_written(self) -> int:
        with storage_errors_pass():
            self._written = pacing.written(self.source.client.job)
        return self._written

    @property
    def _step(self) -> int:
        return self._published[1] if self._published else 0

    def _read_newest(self) -> None:
        """Read which version is the newest. A new generation is a rollback, from which batches are counted again."""
        pair = self.source.newest()
        if pair == self._published or pair is None:
            return
        has_rolled_back = self._published is not None and pair[0] != self._published[0]
        self._published, self._progressed_at = pair, time.monotonic()
        if has_rolled_back:
            self._restart_allowance()


class EngineGate:
    """Keeps work waiting until the engine may be given some, and evaluates versions as they arrive."""

    def __init__(
        self,
        versions: EngineVersions,
        evaluation: VersionWatcher | None,
        settings: SyncSection,
        stop: Callable[[], bool],
    ) -> None:
        self._versions, self._evaluation, self._settings, self._stop = versions, evaluation, settings, stop
        self._evaluated: Pair | None = None
        self._polled_at = time.monotonic()

    @property
    def unproven(self) -> Mapping[str, Unproven]:
        return self._versions.source.unproven

    def wait_until_usable(self, *, is_suspect: bool = False) -> bool:
        """Wait until the engine may be given work, a suspect one is asked first; false once `stop` returns true."""
        end = time.monotonic() + self._settings.timeout
        if is_suspect and not self._stop():
            self._versions.update(0.0)
        while not self._stop():
            if self._versions.is_ready():
                return True
            if time.monotonic() > end:
                why = f": {reason}" if (reason := self._versions.source.reason) else ""
                raise EngineDeadError(
                    f"the engine has run no usable version for {self._settings.timeout:g} s{why}",
                    hint=f"syncd status {self._versions.source.client.job.root}",
                )
            if self.update(PIECE).kind == "ended":
                time.sleep(BREATH)
        return False

    def update(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        outcome = self._versions.update(timeout, ask=ask)
        if outcome.kind == "applied":
            self.evaluate()
        return outcome

    def update_during_work(self) -> None:
        now = time.monotonic()
        if self._settings.style is SyncStyle.FULLY_ASYNC and now - self._polled_at >= _POLL:
            self._polled_at = now
            self._versions.update(0.0)

    def evaluate(self, *, is_last: bool = False) -> None:
        """Evaluate the version that runs, if it is published and new; the last one by all sets, due or not."""
        pair = self._versions.source.runs or BEFORE_THE_FIRST
        if self._evaluation is None or self._stop() or (pair == self._evaluated and not is_last):
            return
        if not self._versions.is_ready() or not self._versions.source.is_published:
            return
        self._evaluated = pair
        self._evaluation.applied(pair, self._versions.digest, is_last=is_last)

    def finish(self) -> None:
        """Load the last version, which may have come just before the end, and evaluate it."""
        self._versions.source.wait_until_published()
        if self._stop():
            return
        outcome, end = self.update(0.0), time.monotonic() + LAST
        while outcome.kind == "unreachable" and not self._stop() and time.monotonic() < end:
            time.sleep(_POLL)
            outcome = self.update(0.0)
        self.evaluate(is_last=True)
