"""Which journal belongs to which job: the run of a gateway is named in both, and in the groups that it writes.

A journal that is not this job's, because the host was lost or the job was made anew, says nothing about it. Then a
new run begins, and what an earlier one has not written is lost. That is reported, and its groups are counted by the
number of open ones, which the job's record has.
"""

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog

from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.records import DamagedLine
from explorer_hooks.parts.agents.replay import JournalReplay
from explorer_hooks.parts.agents.sessions import Sessions
from explorer_hooks.run.own_files import own_path
from syncd.errors import ConfigError, StorageError
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import encode, read_document

STATE = "gateway.json"

HOST = "host"  # why groups were dropped whose journal is lost
EVERY = 5.0  # seconds between two records of the number of open groups, unless a batch was written

_GROUPS = "groups"
_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PlayedTasks:
    """What a gateway plays itself; a later start under its name must agree."""

    digest: str = ""  # the digest of the tasks; empty if drivers say what is played
    seed: str = ""  # the seed of their order


class GatewayRun:
    """The run of a gateway; `clock` gives monotonic seconds."""

    def __init__(
        self,
        writer: ExperienceWriter,
        journal: TurnJournal,
        tasks: PlayedTasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer, self._journal, self._tasks, self._clock = writer, journal, tasks, clock
        self._path = own_path(writer.job, writer.explorer, STATE)
        self._noted: int | None = None
        self._noted_at = clock()
        self.name = ""

    def group(self, name: str) -> str:
        """Return what experiences call a group: unique in the job."""
        return f"{self._writer.explorer}-{self.name}/{name}"

    def resumed(self) -> Sessions:
        """Return what the journal says of this run; begin a new one if it says nothing.

        A new one is the job's once `confirm` was called: until then a start finds the same again.
        """
        recorded_run, lost = self._recorded()
        sessions = Sessions()
        journal_run = self._journal_run()
        if recorded_run and journal_run == recorded_run:
            self.name = sessions.run = recorded_run
            self._replay(sessions)
            return sessions
        self._begin(journal_run)
        sessions.run = self.name
        if recorded_run:
            reason = "this host's journal is not that of the job"
            _LOG.warning("journal_lost", run=recorded_run, groups=lost, reason=reason)
            counted = {HOST: lost} if lost else {}
            sessions.apply(
                {"kind": "over", "groups": {}, "ended": {}, "dropped": counted, "forgotten": counted}
            )
        return sessions

    def confirm(self, sessions: Sessions) -> None:
        """Make the run the job's, once its journal has all of it."""
        self._note(len(sessions.groups))

    def note(self, groups: int, *, now: bool = False) -> None:
        """Record how many groups are open; what the storage refuses is tried again at the next call."""
        if groups != self._noted and (now or self._clock() - self._noted_at >= EVERY):
            with contextlib.suppress(StorageError):
                self._note(groups)

    def _journal_run(self) -> str:
        """Return the run that the journal names, at its beginning or, if that is damaged, where it was rewritten."""
        named = (
            record["run"]
            for record in self._journal.records()
            if not isinstance(record, DamagedLine) and "run" in record
        )
        return str(next(named, ""))

    def _replay(self, sessions: Sessions) -> None:
        replay = JournalReplay(sessions)
        replay.read(self._journal.records(), time.monotonic())
        sessions.apply(sessions.settled(self._writer.upcoming))
        groups = replay.drop()
        if replay.lines or groups:
            aside = self._journal.set_aside()
            _LOG.error("journal_damaged", lines=replay.lines, groups=groups, path=aside)

    def _recorded(self) -> tuple[str, int]:
        """Return the job's run and how many groups it had open, an empty name if there is none."""
        try:
            document = read_document(self._writer.job.disk, self._path)
        except MISSING:
            return "", 0
        if PlayedTasks(document.text("digest"), document.text("seed")) != self._tasks:
            raise ConfigError(
                f"the tasks or their order have changed since explorer {self._writer.explorer} began",
                path=self._path,
                hint=f"give another --name, or start over: rm {self._path}",
            )
        return document.text("run"), document.integer(_GROUPS) if _GROUPS in document.document else 0

    def _begin(self, journal_run: str) -> None:
        aside = f"{self._journal.path}.{journal_run}" if journal_run else ""
        if aside:
            _LOG.warning("journal_set_aside", path=aside)
        self.name = uuid.uuid4().hex[:8]
        self._journal.begin({"kind": "run", "run": self.name}, aside)

    def _note(self, groups: int) -> None:
        self._writer.replace(self._path, encode({"run": self.name, _GROUPS: groups, **asdict(self._tasks)}))
        self._noted, self._noted_at = groups, self._clock()
