"""What a trainer waits for: samples, the explorers that make them, and the daemon."""

import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from syncd.client.client import Client
from syncd.errors import SyncdError
from syncd.protocol.disk import Clock
from syncd.protocol.engine_state import engine_of
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence
from syncd.protocol.takeover import Candidate
from trainer.reporting.figures import span

QUIET = 30.0
"""Seconds of a wait between two steps before it is reported; the first wait of a start is reported at once."""

EVERY = 60.0  # seconds between two lines about one wait


class Waiting:
    """Measures how long samples have been awaited, and when to report it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._due = 0.0
        self._has_begun = False
        self.since = 0.0  # seconds since the epoch, for people

    @property
    def seconds(self) -> float | None:
        return None if self._since is None else self._clock.monotonic() - self._since

    def begin(self) -> None:
        if self._since is not None:
            return
        self._since, self.since = self._clock.monotonic(), self._clock.time()
        self._due = self._since + (QUIET if self._has_begun else 0.0)
        self._has_begun = True

    def end(self) -> None:
        self._since, self._has_begun = None, True

    def is_due(self) -> bool:
        """Return whether a line about the wait is due; the next one is due `EVERY` seconds later."""
        now = self._clock.monotonic()
        if self._since is None or now < self._due:
            return False
        self._due = now + EVERY
        return True


DAEMON = 600.0  # seconds that the daemon has for what a trainer asks of it
_SOON = 5.0  # seconds of a wait for the daemon before it is reported; its work takes less


class DaemonWait:
    """Checks, while the trainer waits for the daemon, what ends the run, and reports who could end the wait.

    `checks` are called again and again; what one raises ends the wait.
    """

    def __init__(self, job: Job, clock: Clock, checks: Sequence[Callable[[], None]]) -> None:
        self._job, self._checks = job, checks
        self._leader = Candidate(job, clock)
        self._reported = ("", -1)

    def __call__(self, what: str, seconds: float) -> None:
        """Report a wait after a few seconds, and then once in a while."""
        for check in self._checks:
            check()
        if seconds >= _SOON and (turn := (what, int((seconds - _SOON) // EVERY))) != self._reported:
            self._reported = turn
            structlog.get_logger().warning("daemon_awaited", text=f"{what} ({span(seconds)}): {self._who()}")

    def _who(self) -> str:
        try:
            leader = self._leader.holder()
        except (OSError, SyncdError) as error:
            return f"whether a daemon leads cannot be read: {error}"
        if leader is None:
            return f"only a daemon can do that, and none leads this job: syncd watch {self._job.root}"
        process = f"process {leader.process.pid} on {leader.host}"
        return f"its daemon ({process}) can do that: syncd status {self._job.root}"


def wait_text(
    path: str,
    since: float,
    seconds: float,
    groups: tuple[int, int],
    rejected: int,
    living: Mapping[str, Presence] | None,
    file: str,
) -> str:
    """Return one line about a wait, for people.

    Args:
        since: Since when they are awaited, in seconds since the epoch.
        seconds: For how long that is.
        groups: Whole groups that have been read, and groups that a step takes.
        rejected: Batches that this start has rejected.
        living: The presences of the living explorers; None if they cannot be read.
    """
    at = time.strftime("%H:%M:%S", time.localtime(since))
    there = f"{groups[0]} of {groups[1]} groups have arrived"
    parts = [f"waiting for experiences in {path} since {at} ({span(seconds)}): {there}"]
    if rejected:
        parts.append(f"{rejected} batches were set aside in {path}/.rejected")
    if living is None:
        parts.append("explorers cannot be seen")
    elif living:
        parts.append(f"{len(living)} explorer{'s' if len(living) > 1 else ''} alive")
        parts.extend(_troubles(living))
    else:
        parts.append(f"no explorer is alive: explorer run {file or 'CONFIG'}")
    return "; ".join(parts)


def _troubles(explorers: Mapping[str, Presence]) -> list[str]:
    """Return one text for each explorer whose engine can do no work or refuses the newest version."""
    reports = {name: engine_of(presence) for name, presence in sorted(explorers.items())}
    return [
        f"{name} has state {report.state}: {report.reason}"
        for name, report in reports.items()
        if report is not None and report.state.is_trouble
    ]


_COUNT_EVERY = 1.0  # seconds between two counts: each reads one file per explorer


class ExplorerLiveness:
    """Counts the living explorers of a job; those that are gone for `grace` seconds have left for good."""

    def __init__(self, client: Client, clock: Clock, grace: float) -> None:
        self._client, self._clock, self._grace = client, clock, grace
        self._counted = float("-inf")
        self._seen = False
        self._gone_since: float | None = None
        self.living: Mapping[str, Presence] = {}

    def have_left(self) -> bool:
        now = self._clock.monotonic()
        if now - self._counted >= _COUNT_EVERY:
            self._counted = now
            self._count(now)
        return self._gone_since is not None and now - self._gone_since >= self._grace

    def _count(self, now: float) -> None:
        self.living = self._client.explorers.living()
        self._seen = self._seen or bool(self.living)
        if self.living or not self._seen:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
