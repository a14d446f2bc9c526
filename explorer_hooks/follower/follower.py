"""The follower: keeps one engine at the version that its policy names, and says truthfully what it runs."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from explorer_hooks.follower.checks import Verify
from explorer_hooks.follower.engine import Engine
from explorer_hooks.follower.engine_driver import Driver
from explorer_hooks.follower.fetch import Placing
from explorer_hooks.follower.options import FollowOptions, Outcome, Tell, policy_of
from explorer_hooks.follower.policy import Situation, choose, has_passed, is_done, is_within, needs_steps
from explorer_hooks.follower.ready import ReadyFile
from explorer_hooks.follower.reporter import Telling
from explorer_hooks.follower.versions import Versions
from explorer_hooks.hook import Hook, Running
from syncd.client.following import has_caught_up
from syncd.client.wait import Deadline
from syncd.context import Closing
from syncd.errors import CorruptDataError, StorageError, SyncdError, TimedOutError
from syncd.protocol.version import UNKNOWN_LABEL, Pair, Version
from syncd.synchronizer import Synchronizer
from syncd.transports.filesystem.stage import Stage
from syncd.transports.memory.load import Copies

__all__ = ["FollowOptions", "Follower", "Outcome"]

_TURN = 10.0
"""Seconds of one turn of `run`; between two turns nothing is lost."""

_LAST = ("applied", "refused")


class Follower(Closing):
    """Follows the versions of a job with one engine. Used by one thread, but for `may_work`.

    Args:
        sync: The connection to the job, as an explorer.
        hook: What loads versions into the engine.
        options: How to follow.
        engine: The engine's name in presence and log, without secrets.
        tell: Hears each event; None for nobody.
        stop: Asked often; once true, what is waited for or read is given up. A load that has begun is finished.

    Examples:
        with Follower.open("/ckpt/job", hook, identity="e0") as follower:
            outcome = follower.turn(timeout=60)
    """

    def __init__(
        self,
        sync: Synchronizer,
        hook: Hook,
        options: FollowOptions | None = None,
        *,
        engine: str = "",
        tell: Tell | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sync, self.options = sync, options or FollowOptions()
        self._policy = policy_of(self.options)
        self._stop = stop
        telling = Telling(sync, tell, ReadyFile(self.options.ready_file))
        stage = Stage(self.options.stage, sync.job.root, sync.clock) if self.options.stage else None
        placing = Placing(
            sync,
            hook,
            Verify(self.options.verify),
            stage,
            Copies(sync.job),
            telling.event,
            self._is_told_to_stop,
        )
        self._stage, self._telling, self._versions = stage, telling, Versions(sync)
        self._engine = Engine(hook, sync.clock, self.options.check_every, self._versions.named)
        self._driver = Driver(self._engine, self._versions, placing, telling, sync.clock, self.options)
        telling.say("waiting", engine=engine or hook.name, loads=0, bytes=0)

    @classmethod
    def open(
        cls,
        job_dir: str | os.PathLike[str],
        hook: Hook,
        identity: str | None = None,
        options: FollowOptions | None = None,
        *,
        engine: str = "",
        tell: Tell | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Connect to a job as an explorer; the engine is asked what it runs.

        Args:
            job_dir: The job directory; it must exist.
            hook: What loads versions into the engine; closed with the follower.
            identity: The explorer's name, unique among those that live.
            options: How to follow.
            engine: The engine's name in presence and log, without secrets.
            tell: Hears each event.
            stop: Asked often; once true, what is waited for or read is given up.

        Raises:
            UsageError: The identity is held by another process that lives.
            JobMissingError: The job directory is not there.
            ConfigError: The stage cannot be used.
        """
        chosen = options or FollowOptions()
        sync = Synchronizer.open(
            job_dir, "explorer", identity, state_dir=chosen.state_dir, poll=chosen.poll, ttl=chosen.ttl
        )
        try:
            made = cls(sync, hook, chosen, engine=engine, tell=tell, stop=stop)
            made._look()
        except BaseException:
            with contextlib.suppress(SyncdError):
                sync.close()
            raise
        return made

    @property
    def applied(self) -> Pair | None:
        """Return the pair that the engine has confirmed, None where it runs no version of the job."""
        return self._engine.applied

    @property
    def state(self) -> str:
        """Return waiting, loading, serving, unreachable or dead."""
        return self._telling.state

    @property
    def met(self) -> int:
        """Return the step that was loaded or given up last, -1 for none."""
        met = [pair for pair in (self._driver.position, *self._driver.attempts.given_up) if pair]
        return max(met)[1] if met else -1

    def adopt(self, pair: Pair) -> None:
        """Take over a published version that has reached the engine by another way than from its files."""
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        self._driver.adopt(pair)

    def know(self, label: str) -> None:
        """Take a label for one of this job: of weights that reach the engine by another way than from files."""
        self._versions.know(label)

    def running(self) -> Running:
        """Ask the engine what it runs; its label is `UNKNOWN` unless it is one of this job. Any thread may ask.

        Raises:
            EngineUnreachableError: The engine does not answer.
        """
        said = self._engine.hook.current_version()
        if said.label is None or self._versions.is_known(said.label):
            return said
        return Running(UNKNOWN_LABEL, said.paused)

    def recover(self) -> None:
        """Bring the engine back that weights from elsewhere have left in pieces.

        It goes back to the last good version. Where there is none it stays paused until files come.
        """
        self._driver.recover()

    def disown(self) -> None:
        """Publish that the engine runs no version, where it was given one that came to nothing."""
        self._telling.confirm(None)

    def may_work(self) -> bool:
        """Say whether the engine is to be given work.

        It answers, runs a version of the job or what it was started with, and is not further behind than `max_lag`.
        """
        if self._engine.dead is not None or not self._engine.is_reachable or not self._engine.is_known:
            return False
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        return is_within(self.applied, self._versions.pair, self.options.max_lag)

    def turn(self, timeout: float = 60.0, *, ask: bool = False) -> Outcome:
        """Wait for a version that is due, and load it.

        Args:
            timeout: Seconds to wait for it; a load that has begun is not cut short.
            ask: Whether the trainer is asked for a version, and its answer that there is none ends the wait.

        Returns:
            What became of it. A version that failed is tried again within the turn.

        Raises:
            EngineDeadError: The engine can neither load nor go back; a restarted one is followed by the next turn.
            StorageError: The job directory could not be read for half a minute.
        """
        deadline = Deadline(self.sync.clock, timeout)
        self._look()
        last: Outcome | None = None
        while True:
            found = self._awaited(max(deadline.left(), 0.0), ask=ask)
            if isinstance(found, Outcome):
                return last if last is not None and found.kind == "nothing" else found
            last = self._driver.load(found)
            if last.kind in _LAST or last.pair in self._driver.attempts.given_up:
                return last

    def is_current(self) -> bool:
        """Say whether the engine runs what the policy names."""
        return self.applied is not None and choose(self._policy, self._situation()) is None

    def run(
        self, stop: Callable[[], bool] = lambda: False, hear: Callable[[Outcome], None] | None = None
    ) -> Outcome:
        """Take turns until it is told to stop, the trainer has gone, or the policy wants nothing more.

        Args:
            stop: Asked often. A load that has begun is finished first.
            hear: Given each outcome but those of turns in which nothing happened.

        Returns:
            The last outcome.

        Raises:
            EngineDeadError: The engine can neither load nor go back.
        """
        self._stop = stop
        while True:
            try:
                outcome = self.turn(_TURN)
            except StorageError as error:
                self._telling.event("error", "storage_failed", reason=str(error), hint=error.hint)
                outcome = Outcome("nothing", reason=str(error))
            if hear is not None and outcome.kind != "nothing":
                hear(outcome)
            if stop() or self._is_last(outcome):
                return outcome

    def close(self) -> None:
        """Publish that this explorer has stopped; the engine keeps running. A second call does nothing."""
        self._driver.close()
        try:
            self.sync.close()
        finally:
            if self._stage is not None:
                self._stage.close()

    def _is_told_to_stop(self) -> bool:
        return self._stop()

    def _look(self) -> None:
        with contextlib.suppress(SyncdError, OSError):
            self._versions.read()
        self._driver.look()

    def _awaited(self, timeout: float, *, ask: bool) -> Version | int | Outcome:
        """Return what is to be loaded, or why nothing is."""
        try:
            if ask and self._engine.is_reachable:
                return self._answered(timeout)
            found = self.sync.wait_for(self._news, timeout)
        except TimedOutError:
            if self._engine.is_reachable:
                return Outcome("nothing", reason="no version was due in time")
            return Outcome("unreachable", reason=self._engine.reason)
        assert found is not None
        return found

    def _answered(self, timeout: float) -> Version | int | Outcome:
        found = self._news()
        if found is None:
            self.sync.wait_new_model_state_dict(self.met, timeout=timeout)
            found = self._news()
        return found if found is not None else Outcome("nothing", reason="the trainer has nothing newer")

    def _news(self) -> Version | int | Outcome | None:
        """Look once: what is to be loaded now, why nothing will be, or None while it may come."""
        if self._stop():
            return Outcome("nothing", reason="told to stop")
        with contextlib.suppress(CorruptDataError):  # the daemon is about to replace it
            self._versions.read()
        if self._engine.is_due():
            self._driver.look()
        self._driver.show()
        if self._engine.dead is not None:
            raise self._engine.dead
        return self._due() if self._engine.is_reachable else None

    def _due(self) -> Version | int | Outcome | None:
        now = self._situation()
        pair = choose(self._policy, now)
        if pair is not None:
            return self._versions.find(pair)
        if now.again and now.newest and not self._driver.attempts.resting and self._driver.can_go_back:
            self._driver.bring_back()
            return None
        return self._end(now)

    def _situation(self) -> Situation:
        attempts = self._driver.attempts
        skipped = attempts.given_up | attempts.resting
        now = Situation(self._versions.pair, self._driver.position, self._driver.needs_load, (), skipped)
        return replace(now, steps=self._versions.older()) if needs_steps(self._policy, now) else now

    def _end(self, now: Situation) -> Outcome | None:
        if is_done(self._policy, self.applied):
            return Outcome("ended", self.applied, "the step that was wanted is loaded")
        if has_passed(self._policy, now):
            return Outcome("gone", reason=f"step {self._policy.step} is not there any more")
        if self.options.stay or self._driver.attempts.resting:
            return None
        departed = self.sync.trainers.departed() or ()
        if any(has_caught_up(self._versions.newest, trainer) for trainer in departed):
            return Outcome("ended", self.applied, "the trainer has gone")
        return None

    def _is_last(self, outcome: Outcome) -> bool:
        has_gone = outcome.kind == "gone" and outcome.pair is None
        return outcome.kind == "ended" or has_gone or is_done(self._policy, self.applied)
