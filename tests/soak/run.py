"""One soak: the parts, what is done to them, and what is looked at meanwhile."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from soak import report
from soak.bed import Bed, bed
from soak.chaos import Chaos
from soak.crew import crew
from soak.plan import Plan
from soak.samples import Samples
from soak.schedule import TRAINER, Terms, schedule
from soak.versions import Versions
from support import checker

PATIENCE = 60.0
_TELL_EVERY = 300.0
_TEND_EVERY = 0.1


class Soak:
    """All parts of one soak.

    Args:
        plan: What it is.
        where: Where it runs.
    """

    def __init__(self, plan: Plan, where: Bed) -> None:
        self._plan, self._bed = plan, where
        backs: list[int] = []
        self.parts = crew(plan, where, backs)
        spared_from = plan.seconds / 3
        terms = Terms(plan.seconds, plan.gap, plan.ttl, plan.names, plan.spared, spared_from, where.kinds)
        acts = schedule(plan.seed, terms)
        self.chaos = Chaos(acts, self.parts, where.job, where.point, backs.append)
        self.versions, self.samples = Versions(where.job), Samples()
        self.wrong: list[str] = []
        self.settled_after = 0.0

    def run(self) -> None:
        """Let it run to its end; what is wrong is in `wrong`."""
        for part in self.parts.values():
            part.start()
        self.versions.start()
        self._until(lambda: self.versions.pair is not None, "the first version")
        self.chaos.start()
        try:
            self._look_on(self._plan.seconds)
        finally:
            self.chaos.end()
        self._settle()

    def close(self) -> None:
        """Leave nothing running, whatever has happened."""
        self.chaos.end()
        self.versions.end(PATIENCE)
        for part in self.parts.values():
            part.end(PATIENCE)

    def summary(self) -> dict[str, Any]:
        """Return all figures, and under `wrong` everything that must not be."""
        plan, parts, where = self._plan, self.parts.values(), self._bed
        explorers, wrong_loads = report.of_explorers(plan, where, self.chaos.disturbances)
        daemons, wrong_leaders = report.of_daemons(where)
        samples, grown = report.of_samples(plan, self.samples)
        wrong = [*self.wrong, *self.versions.wrong, *self.chaos.wrong]
        wrong += [end for part in parts for end in part.ends] + report.tracebacks(where, self.parts)
        return {
            "seed": plan.seed,
            "seconds": round(plan.seconds),
            "explorers": plan.explorers,
            "cannot_be_done": where.skipped,
            "done": dict(sorted(self.chaos.done.items())),
            "starts": {part.name: part.starts for part in parts},
            **report.of_trainer(where),
            "versions": self.versions.seen,
            "overtaken": self.versions.overtaken,
            "pair": self.versions.pair,
            **daemons,
            **explorers,
            "settled_after": round(self.settled_after, 1),
            **samples,
            "wrong": wrong + wrong_loads + wrong_leaders + grown,
        }

    def _look_on(self, seconds: float) -> None:
        began, sampled, told = time.monotonic(), float("-inf"), 0.0
        while (at := time.monotonic() - began) < seconds:
            self._tend()
            if at - sampled >= self._plan.sample:
                sampled = at
                self.samples.take(at, self._bed.job, {name: part.pid for name, part in self.parts.items()})
            if at - told >= _TELL_EVERY:
                told = at
                self._tell(at)
            time.sleep(_TEND_EVERY)

    def _tell(self, at: float) -> None:
        seen, done = self.versions.seen, sum(self.chaos.done.values())
        wrong = len(self.versions.wrong) + len(self.chaos.wrong)
        line = f"{at:.0f} s: {seen} versions, {done} disturbances, {wrong} violations"
        print(line, file=sys.stderr, flush=True)

    def _tend(self) -> None:
        for part in self.parts.values():
            part.tend()

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > ends:
                self.wrong.append(f"waited {PATIENCE:g} s in vain for {what}")
                return
            self._tend()
            time.sleep(_TEND_EVERY)

    def _settle(self) -> None:
        """Left alone, the trainer ends, its last step is published, and every explorer runs it."""
        began, job, names = time.monotonic(), self._bed.job, self._plan.names
        self._until(lambda: all(part.pid for part in self.parts.values()), "all parts to be there again")
        self.parts[TRAINER].end(PATIENCE)
        self._until(lambda: _published(job) == checker.marker(job), "the last step to be published")
        follow = lambda: all(_applied(job, name) == checker.pair(job) for name in names)  # noqa: E731
        self._until(follow, "every explorer to run the last version")
        self.settled_after = time.monotonic() - began
        past = checker.Past(self.versions.pair)
        self.close()
        self.wrong += checker.problems(job, past)


def _published(job: str) -> int | None:
    pair = checker.pair(job)
    return pair[1] if pair else None


def _applied(job: str, name: str) -> checker.Pair | None:
    """Return what an explorer says that it runs."""
    try:
        with open(f"{job}/.syncd/explorers/{name}.json", encoding="utf-8") as file:
            applied = json.load(file)["applied"]
    except (OSError, ValueError):
        return None
    return (applied["generation"], applied["step"]) if applied else None


def soak(plan: Plan, place: str) -> dict[str, Any]:
    """Run a soak and return its summary.

    Args:
        plan: What it is.
        place: An empty directory for logs and journals.
    """
    with bed(place) as where:
        running = Soak(plan, where)
        try:
            running.run()
        finally:
            running.close()
        return running.summary()
