"""The loop: bring the engine to a version, make a batch, write it, follow; one small decision after the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from explorer_hooks.explorer import pacing
from explorer_hooks.explorer.batches import Batch, Batches
from explorer_hooks.explorer.cursor import Ledger
from explorer_hooks.explorer.evaluation import Evaluation
from explorer_hooks.explorer.generation import BEFORE_THE_FIRST
from explorer_hooks.explorer.pacing import Allowance, Next, Situation
from explorer_hooks.explorer.records import Records
from explorer_hooks.explorer.weight_sources import Source
from explorer_hooks.follower.follower import TurnOutcome
from explorer_hooks.follower.policy import asks_trainer
from syncd.client.sync_policy import SyncStyle
from syncd.errors import EngineDeadError, TimedOutError
from syncd.jobfile.records import read_end
from syncd.protocol.version import label_of

if TYPE_CHECKING:
    from syncd.protocol.version import Pair

TURN = 1.0
"""Seconds of one wait: how long a signal may go unheard."""

_BREATH = 0.05
"""Seconds between two asks that the trainer answers at once."""

_LOOK = 0.25
"""Seconds between two looks for a version while groups are being made."""

_LAST = 30.0
"""Seconds in which an engine that is being started again may still take the last version, and a daemon publish it."""

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Rules:
    """How an explorer goes on.

    Args:
        style: Who decides when versions are taken.
        interval: Batches between two syncs.
        offset: Batches that explorers go ahead.
        ahead: Steps for which batches may wait, besides the trainer's next one.
        batches_per_step: Batches of this size that the trainer takes a step.
        patience: Seconds without a version after which a trainer that lives is given further batches.
        timeout: Seconds to wait for a trainer, and for an engine, at most.
        max_batches: Batches of this explorer after which it ends; None for no end.
    """

    style: SyncStyle
    interval: int
    offset: int
    ahead: int
    batches_per_step: float
    patience: float
    timeout: float
    max_batches: int | None = None


class Explorer:
    """Explores until the trainer has gone, the tasks are done, or it is told to stop.

    Args:
        source: Keeps the engine at a version.
        ledger: Writes batches, and knows where the tasks stand.
        rules: How it goes on.
        metrics: Where a line for each batch goes.
        stop: Once true, it ends.
    """

    def __init__(
        self, source: Source, ledger: Ledger, rules: Rules, metrics: Records, stop: Callable[[], bool]
    ) -> None:
        self._source, self._ledger, self._rules = source, ledger, rules
        self._metrics, self._stop = metrics, stop
        self._batches: Batches | None = None
        self._evaluation: Evaluation | None = None
        self._evaluated: Pair | None = None
        # From the very beginning: an explorer that comes later has no allowance of its own.
        self._allowance = Allowance(0, 0, rules.batches_per_step, rules.ahead)
        self._synced_at = ledger.cursor.batches
        self._looked = self._progress = self._seen_trainer = time.monotonic()
        self._published: Pair | None = None
        self._asked_end = float("-inf")
        self._end_since: float | None = None
        self._waited = 0.0

    def equip(self, batches: Batches, evaluation: Evaluation | None) -> None:
        """Give it what makes batches, which has to ask it whether work may be done."""
        self._batches, self._evaluation = batches, evaluation

    def run(self) -> str:
        """Explore; return why it ended.

        Raises:
            TimedOutError: No trainer has come.
            EngineDeadError: The engine is dead, or did not come back.
            SyncdError: A batch could not be written, or the tasks cannot be used.
        """
        assert self._batches is not None
        self._noted(self._source.turn(0.0))
        while True:
            over = self._over(self._batches)
            doing = pacing.decide(self._situation(is_over=bool(over)))
            if doing is Next.END:
                break
            self._do(doing, self._batches)
        self._finish()
        return over

    def usable(self, suspect: bool = False) -> bool:  # noqa: FBT001, FBT002 - what is handed on is a fact
        """Wait until the engine may be given work; return whether it may, false once it is told to stop.

        Args:
            suspect: Whether the engine did not do its work: it is asked first what it runs.

        Raises:
            EngineDeadError: It is dead, or did not come back in time.
        """
        end = time.monotonic() + self._rules.timeout
        if suspect and not self._stop():
            self._noted(self._source.turn(0.0), evaluate=False)
        while not self._stop():
            if self._is_ready():
                return True
            if time.monotonic() > end:
                raise EngineDeadError(
                    f"the engine runs no version to work with for {self._rules.timeout:g} s",
                    hint=f"syncd status {self._source.sync.job.root}",
                )
            if self._noted(self._source.turn(TURN)).kind == "ended":
                time.sleep(_BREATH)
        return False

    def meanwhile(self) -> None:
        """Take a version that has appeared, where the style allows that while work is under way."""
        now = time.monotonic()
        if self._rules.style is SyncStyle.FULLY_ASYNC and now - self._looked >= _LOOK:
            self._looked = now
            self._noted(self._source.turn(0.0), evaluate=False)

    def permitted(self) -> "Pair | None":
        """Return the version that work may be done with; None while the engine has none. Any thread may ask."""
        runs = self._source.runs
        if runs is not None:
            return runs
        # An engine that runs no version is what it was started with, which only counts before the first one.
        return BEFORE_THE_FIRST if self._published is None else None

    # --- one decision -----------------------------------------------------------------------------------------

    def _situation(self, *, is_over: bool) -> Situation:
        rules, batches = self._rules, self._ledger.cursor.batches
        step = self._published[1] if self._published else 0
        return Situation(
            is_over=is_over,
            is_ready=is_over or self._is_ready(),
            is_due=pacing.sync_is_due(rules.style, batches, self._synced_at, rules.interval, rules.offset),
            has_room=self._allowance.covers(step, pacing.written(self._source.sync.job)),
        )

    def _do(self, doing: Next, batches: Batches) -> None:
        if doing is Next.WORK:
            self._work(batches)
        elif doing is Next.ENGINE:
            self.usable()
        else:
            self._wait(is_due=doing is Next.SYNC)

    def _work(self, batches: Batches) -> None:
        self._evaluate()
        begin = time.monotonic()
        batch = batches.make()
        if batch is None or batch.then is None:
            return
        then = self._ledger.cursor.behind(*batch.then, batch=bool(batch.experiences))
        if not batch.experiences:
            self._ledger.move(then)
            return
        seconds = time.monotonic() - begin
        if not self._is_vouched_for(batch):
            return
        path = self._ledger.write(batch.experiences, then)
        self._record(batch, path, seconds)
        self._evaluate()
        if self._rules.style is SyncStyle.FULLY_ASYNC:
            self._noted(self._source.turn(0.0))

    def _is_vouched_for(self, batch: Batch) -> bool:
        """Say whether a batch may be written; the tasks of one that may not come again."""
        begin = time.monotonic()
        is_good = self._source.vouches(batch.pairs)
        self._waited += time.monotonic() - begin
        if not is_good:
            _LOG.warning(
                "batch_discarded", rollouts=len(batch.experiences), reason="their version was not published"
            )
        return is_good

    def _wait(self, *, is_due: bool) -> None:
        """Wait a little for a version; while one is due or there is no room, nothing is under way."""
        begin = time.monotonic()
        outcome = self._noted(self._source.turn(TURN, ask=asks_trainer(self._rules.style)))
        took = time.monotonic() - begin
        self._waited += took
        answered = outcome.kind == "nothing" and took < TURN
        if is_due and (outcome.kind in ("applied", "refused", "gone", "failed") or answered):
            self._synced_at = self._ledger.cursor.batches
        if time.monotonic() - self._progress > self._rules.patience:
            self._grant()
        if took < _BREATH:
            time.sleep(_BREATH)

    def _grant(self) -> None:
        """Count anew: a trainer that lives and comes to no version has dropped batches, and waits for others."""
        _LOG.info("allowance_renewed", seconds=self._rules.patience)
        self._progress = time.monotonic()
        self._synced_at = self._ledger.cursor.batches
        self._allowance = self._from_now_on()

    def _from_now_on(self) -> Allowance:
        step = self._published[1] if self._published else 0
        count = pacing.written(self._source.sync.job)
        return Allowance(step, count, self._rules.batches_per_step, self._rules.ahead)

    # --- what is so -------------------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        """Say whether the engine runs an applied version; before the first one, what it was started with."""
        self._look()
        if not self._source.may_work():
            return False
        return self.permitted() is not None

    def _look(self) -> None:
        """Look which version is the newest; a new generation is a way back, from which batches count anew."""
        pair = self._source.newest()
        if pair == self._published or pair is None:
            return
        turned_back = self._published is not None and pair[0] != self._published[0]
        self._published, self._progress = pair, time.monotonic()
        if turned_back:
            self._allowance = self._from_now_on()

    def _over(self, batches: Batches) -> str:
        """Return why nothing more is wanted, empty while something is."""
        if self._stop():
            return "told to stop"
        if self._rules.max_batches is not None and self._ledger.cursor.batches >= self._rules.max_batches:
            return "max_batches"
        if batches.is_over:
            return "all tasks are done"
        if end := self._end_of_job():
            return f"the job is finished: {end}"
        return "the trainer has gone" if self._trainer_has_gone() else ""

    def _end_of_job(self) -> str:
        """Return what the job has reached once its last version is published, whatever presence files say."""
        now = time.monotonic()
        if now - self._asked_end < TURN:
            return ""
        self._asked_end, end = now, read_end(self._source.sync.job)
        if end is None:
            self._end_since = None
            return ""
        self._end_since = self._end_since or now
        newest = self._source.newest()
        is_published = newest is not None and newest[1] >= end.step
        return end.reason if is_published or now - self._end_since >= _LAST else ""

    def _trainer_has_gone(self) -> bool:
        sync = self._source.sync
        if sync.trainer_requires_weight_sync() is None:
            return True
        now = time.monotonic()
        if sync.trainers.last():
            self._seen_trainer = now
        elif now - self._seen_trainer > self._rules.timeout:
            raise TimedOutError(
                f"no trainer has come for {self._rules.timeout:g} s",
                hint="start `trainer train`, or give a longer sync.timeout",
            )
        return False

    # --- what is told -----------------------------------------------------------------------------------------

    def _noted(self, outcome: TurnOutcome, *, evaluate: bool = True) -> TurnOutcome:
        if outcome.kind == "applied":
            self._synced_at = self._ledger.cursor.batches
            self._look()
            if evaluate:
                self._evaluate()
        return outcome

    def _evaluate(self) -> None:
        """Evaluate the version that runs, once published, where its turn has come and it has not been met before."""
        pair = self._source.runs or BEFORE_THE_FIRST
        if self._evaluation is None or pair == self._evaluated or self._stop():
            return
        if not self._is_ready() or not self._source.is_published:
            return
        self._evaluated = pair
        self._evaluation.applied(pair)

    def _record(self, batch: Batch, path: str, seconds: float) -> None:
        rewards = [one.reward for one in batch.experiences]
        line: dict[str, Any] = {
            "batch": self._ledger.cursor.batches,
            "at": time.time(),
            "rollouts": len(rewards),
            "tokens": batch.tokens,
            "seconds": round(seconds, 3),
            "waited": round(self._waited, 3),
            "rollouts_per_s": round(len(rewards) / max(seconds, 1e-6), 3),
            "tokens_per_s": round(batch.tokens / max(seconds, 1e-6), 3),
            "reward_mean": _mean(rewards),
            "versions": dict(batch.versions),
            "dropped": dict(batch.dropped),
        }
        self._waited = 0.0
        self._metrics.add(line)
        shown = {key: value for key, value in line.items() if key != "at"}
        self._source.sync.describe({"explorer": shown}, now=False)
        _LOG.info("batch_written", path=path, **shown)

    def _finish(self) -> None:
        """Take the last version, which came just before the end, and evaluate it."""
        self._source.settle()
        if not self._stop():
            self._noted(self._last())
            self._evaluate()
        runs = self._source.runs
        _LOG.info(
            "explorer_finished", batches=self._ledger.cursor.batches, version=label_of(runs) if runs else None
        )

    def _last(self) -> TurnOutcome:
        outcome, end = self._source.turn(0.0), time.monotonic() + _LAST
        while outcome.kind == "unreachable" and not self._stop() and time.monotonic() < end:
            time.sleep(_LOOK)
            outcome = self._source.turn(0.0)
        return outcome


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
