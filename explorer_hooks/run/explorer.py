"""The loop of an explorer: bring the engine to a version, make a batch, write it, follow."""

import time
from collections.abc import Callable, Sequence

import structlog

from explorer_hooks.run import pacing
from explorer_hooks.run.batches import BatchMaker, ExplorerBatch
from explorer_hooks.run.curriculum import with_dropped
from explorer_hooks.run.engine_gate import BREATH, EngineGate, EngineVersions
from explorer_hooks.run.job_watch import JobWatch
from explorer_hooks.run.own_files import (
    KeyedGroup,
    Records,
    TaskCursor,
    TaskLedger,
    batch_figures,
    encoded_parts,
    record_batch,
)
from explorer_hooks.run.pacing import Next
from explorer_hooks.run.weight_sources import PIECE
from explorer_hooks.tasks.order import set_figures
from syncd.client.sync_policy import SyncStyle
from syncd.errors import UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.version import label_of

_LOG = structlog.get_logger()


class Explorer:
    """Explores until the trainer is gone, the tasks are done, or it is told to stop."""

    def __init__(
        self,
        versions: EngineVersions,
        gate: EngineGate,
        batches: BatchMaker,
        ledger: TaskLedger,
        file: JobFile,
        metrics: Records,
        stop: Callable[[], bool],
    ) -> None:
        self._versions, self._gate, self._batches = versions, gate, batches
        self._ledger, self._metrics, self._stop = ledger, metrics, stop
        self._settings, self._sync = file.explorer, file.sync
        self._source = versions.source
        self._end = JobWatch(self._source, file.sync.timeout)
        self._waited = 0.0

    def run(self) -> str:
        self._gate.update(0.0)
        while True:
            reason = self._reason_to_end()
            doing = self._next(is_over=bool(reason))
            if doing == "end":
                break
            if doing == "work":
                self._work()
            elif doing == "engine":
                self._gate.wait_until_usable()
            else:
                self._wait(is_due=doing == "sync")
        self._finish()
        return reason

    def _next(self, *, is_over: bool) -> Next:
        sync, versions, batches = self._sync, self._versions, self._ledger.cursor.batches
        return pacing.decide(
            is_over=is_over,
            is_ready=is_over or versions.is_ready(),
            is_due=pacing.sync_is_due(sync.style, batches, versions.synced_at, sync.interval, sync.offset),
            has_room=versions.room() > 0,
        )

    def _work(self) -> None:
        self._gate.evaluate()
        begin = time.monotonic()
        batch = self._batches.make()
        if batch is None or batch.then is None:
            return
        then = self._ledger.cursor.behind(*batch.then, batch=bool(batch.experiences))
        if not batch.experiences:
            self._ledger.move(then)
            self._batches.done(batch)
            return
        seconds = time.monotonic() - begin
        if not self._is_published(batch):
            return
        groups = with_dropped(sorted(batch.groups.items()), batch.dropped["equal"], self._settings.reward)
        path = self._write(groups, then)
        self._batches.done(batch)
        self._record(batch, path, seconds)
        self._gate.evaluate()
        if self._sync.style is SyncStyle.FULLY_ASYNC:
            self._gate.update(0.0)

    def _write(self, groups: Sequence[KeyedGroup[tuple[int, int]]], then: TaskCursor) -> str:
        """Write groups, in several files if one would be too large, and return the path of the last one."""
        path = ""
        for part, encoded in encoded_parts(groups):
            if isinstance(encoded, UsageError):
                raise encoded
            place, _ = part[-1]
            is_last = place == groups[-1][0]
            behind = then if is_last else self._ledger.cursor.behind(*place, batch=False)
            path = self._ledger.write(encoded, behind, is_rest=bool(path))
        return path

    def _is_published(self, batch: ExplorerBatch) -> bool:
        """Return whether a batch may be written; if not, its tasks are done again."""
        begin = time.monotonic()
        is_good = self._source.are_published(batch.pairs)
        self._waited += time.monotonic() - begin
        if not is_good:
            _LOG.warning(
                "batch_discarded",
                rollouts=len(batch.experiences),
                reason="their version was not published, or the engine started with another model",
            )
        return is_good

    def _wait(self, *, is_due: bool) -> None:
        """Wait a little for a version; while one is due or there is no room, nothing is generated."""
        begin = time.monotonic()
        outcome = self._gate.update(PIECE, ask=self._sync.style is SyncStyle.EXPLORER_DRIVEN)
        took = time.monotonic() - begin
        self._waited += took
        answered = outcome.kind == "nothing" and took < PIECE
        if is_due and (outcome.kind in ("applied", "refused", "gone", "failed") or answered):
            self._versions.mark_synced()
        if self._versions.renew_allowance(self._settings.patience):
            _LOG.info("allowance_renewed", seconds=self._settings.patience)
        if took < BREATH:
            time.sleep(BREATH)

    # --- the end ----------------------------------------------------------------------------------------------

    def _reason_to_end(self) -> str:
        if self._stop():
            return "told to stop"
        most = self._settings.max_batches
        if most is not None and self._ledger.cursor.batches >= most:
            return "max_batches"
        if self._batches.is_over:
            return "all tasks are done"
        return self._end.reason()

    def _finish(self) -> None:
        self._gate.finish()
        runs = self._source.runs
        version = label_of(runs) if runs else None
        _LOG.info("explorer_finished", batches=self._ledger.cursor.batches, version=version)

    # --- the record -------------------------------------------------------------------------------------------

    def _record(self, batch: ExplorerBatch, path: str, seconds: float) -> None:
        rewards = [experience.reward for experience in batch.experiences]
        line = {
            "batch": self._ledger.cursor.batches,
            **batch_figures(rewards, batch.tokens, seconds),
            "waited": round(self._waited, 3),
            "versions": dict(batch.versions),
            "task_sets": set_figures(batch.task_sets),
            "unproven_tokens": batch.unproven,
            "unreadable_versions": batch.unreadable_versions,
            "untaught_groups": batch.untaught_groups,
            "equal_groups": batch.equal_groups,
            "skipped": batch.skipped,
            "dropped": dict(batch.dropped),
        }
        self._waited = 0.0
        record_batch(self._metrics, self._source.client, path, line)
