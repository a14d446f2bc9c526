"""Which journal belongs to which job: the run of a gateway is named in both, and in the groups that it writes.

A journal that is not this job's, because the host was lost or the job was made anew, says nothing about it. Then a
new run begins, and what an earlier one has not written is lost; that is reported.
"""

import time
import uuid
from dataclasses import asdict, dataclass

import structlog

from explorer_hooks.explorer.own_files import own_path
from explorer_hooks.gateway.journal import TurnJournal
from explorer_hooks.gateway.sessions import Sessions
from syncd.errors import ConfigError
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import encode, read_document

STATE = "gateway.json"
_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PlayedTasks:
    """What a gateway plays itself; a later start under its name must agree.

    Args:
        digest: The digest of the tasks; empty if drivers say what is played.
        seed: The seed of their order.
    """

    digest: str = ""
    seed: str = ""


class GatewayRun:
    """The run of a gateway.

    Args:
        writer: Writes under the gateway's identity.
        journal: What it has recorded.
        tasks: What it plays.
    """

    def __init__(self, writer: ExperienceWriter, journal: TurnJournal, tasks: PlayedTasks) -> None:
        self._writer, self._journal, self._tasks = writer, journal, tasks
        self._path = own_path(writer.job, writer.explorer, STATE)
        self.name = ""

    def group(self, name: str) -> str:
        """Return what experiences call a group: unique in the job."""
        return f"{self._writer.explorer}-{self.name}/{name}"

    def resumed(self) -> Sessions:
        """Return what the journal says of this run; begin a new one if it says nothing.

        Raises:
            ConfigError: It played other tasks.
            CorruptDataError: The journal or the job's record of it is damaged.
            StorageError: It cannot be read or written.
        """
        known = self._known()
        sessions = Sessions()
        records = self._journal.records()
        first = next(records, None)
        found = first["run"] if first is not None and first["kind"] == "run" else ""
        if known and found == known:
            self.name = known
            for record in records:
                sessions.apply(record, time.monotonic())
            sessions.apply(sessions.settled(self._writer.upcoming))
            return sessions
        self._begin(known, found)
        return sessions

    def told(self, sessions: Sessions) -> dict[str, int]:
        """Return the figures of what was resumed."""
        return {"groups": len(sessions.groups), "sessions": len(sessions.by_id)}

    def _known(self) -> str:
        try:
            found = read_document(self._writer.job.disk, self._path)
        except MISSING:
            return ""
        if PlayedTasks(found.text("digest"), found.text("seed")) != self._tasks:
            raise ConfigError(
                f"the tasks or their order have changed since explorer {self._writer.explorer} began",
                path=self._path,
                hint=f"give another --name, or start over: rm {self._path}",
            )
        return found.text("run")

    def _begin(self, known: str, found: str) -> None:
        if known:
            _LOG.warning("journal_lost", run=known, reason="this host's journal is not that of the job")
        aside = f"{self._journal.path}.{found}" if found else ""
        if aside:
            _LOG.warning("journal_set_aside", path=aside)
        self.name = uuid.uuid4().hex[:8]
        self._journal.begin({"kind": "run", "run": self.name}, aside)
        self._writer.replace(self._path, encode({"run": self.name, **asdict(self._tasks)}))
