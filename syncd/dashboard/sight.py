"""Looks at one job for the page; whatever may hang on a dead mount happens in here, also the opening of the job."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncd.daemon.retention import Policy, decide
from syncd.dashboard import document
from syncd.errors import ConfigError, StorageError
from syncd.observe.journal import read_events
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.views.look import Looker

_EVENTS = 200
"""Of the journal's newest, in which those that are worth showing are looked for."""


class Sight:
    """Takes looks at a job.

    Args:
        open_job: Returns the job, or raises what is wrong with it.
        rules: Reads by which policy its daemon prunes.
        clock: This host's clock.
    """

    def __init__(self, open_job: Callable[[], Job], rules: Callable[[Job], Policy], clock: Clock) -> None:
        self._open, self._rules, self._clock = open_job, rules, clock
        self._job: Job | None = None
        self._policy: Policy | None = None
        self._policy_problem = ""

    def __call__(self) -> dict[str, Any]:
        """Take one look.

        Raises:
            SyncdError: The job is not there, cannot be read, or at the first look its configuration is wrong.
        """
        if self._job is None:
            self._job = self._open()
            self._looker = Looker(self._job, self._clock)
        look, policy = self._looker.look(), self._follow(self._job)
        if self._policy_problem:
            look = replace(look, problems={**look.problems, "config": self._policy_problem})
        return document.found(
            look, decide(look.scanned, policy), policy, read_events(self._job.events, _EVENTS)
        )

    def _follow(self, job: Job) -> Policy:
        """Return the policy; one that has become unreadable is a problem to show, not the end of the page."""
        try:
            self._policy, self._policy_problem = self._rules(job), ""
        except (ConfigError, StorageError) as error:
            if self._policy is None:
                raise
            self._policy_problem = str(error)
        return self._policy
