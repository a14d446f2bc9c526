"""One soak: the parts, what is done to them, what is looked at meanwhile, and what it all comes to."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import checker
from beds import probe
from beds.loop import mounted

from soak import judging
from soak.chaos import Chaos
from soak.flat import is_flat, trend
from soak.parts import Part
from soak.samples import ALLOWED, KEPT, Samples
from soak.schedule import DAEMONS, KINDS, ON_DISK, TRAINER, Act, Terms, schedule
from soak.versions import Versions

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = 60.0
_TELL_EVERY = 300.0
JUDGED_FROM = 300.0
"""Seconds of the second half from which on its slope says something: before, processes still grow into their size."""

EVENTS_BYTES = 128 << 10
_SETTINGS = "keep_last = 2\ntrash_grace = 0.5\npartial_grace = 30.0\n"


@dataclass(frozen=True)
class Plan:
    """What a soak is.

    Args:
        seconds: How long the parts are disturbed.
        seed: Of the schedule.
        gap: Mean seconds between two disturbances.
        explorers: How many.
        pause: Seconds between two steps of the trainer.
        ttl: Of the explorers.
        takeover: Of the daemons.
        sample: Seconds between two samples.
        slow: Seconds for which every fourth explorer reads one version.
    """

    seconds: float
    seed: int = 1
    gap: float = 6.0
    explorers: int = 8
    pause: float = 1.0
    ttl: float = 20.0
    takeover: float = 5.0
    sample: float = 5.0
    slow: float = 5.0

    @property
    def names(self) -> list[str]:
        """Return the explorers' names."""
        return [f"e{number}" for number in range(self.explorers)]

    @property
    def spared(self) -> tuple[str, ...]:
        """Return the parts that are not started anew in the last two thirds."""
        return (DAEMONS[0], *self.names[:3])


@dataclass
class Bed:
    """Where a soak runs: the file system of the job, a place beside it, and what can be done there."""

    point: str
    place: str
    kinds: list[str]
    skipped: list[str] = field(default_factory=list)

    @property
    def job(self) -> str:
        """Return the job directory."""
        return f"{self.point}/job"

    def log(self, name: str) -> str:
        """Return the log of a part."""
        return f"{self.place}/{name}.log"

    def journal(self, name: str) -> str:
        """Return the journal of a part."""
        return f"{self.place}/{name}.jsonl"


@contextlib.contextmanager
def bed(place: str) -> Iterator[Bed]:
    """Make a file system for the job if this machine lets us, and say what cannot be done without."""
    reasons = {kind: probe.loop_mount("ext4") for kind in ON_DISK} | {"cut": probe.silent_mount()}
    skipped = [f"no {kind}: {reason}" for kind, reason in reasons.items() if reason]
    kinds = [kind for kind in KINDS if not reasons.get(kind)]
    with contextlib.ExitStack() as stack:
        point = f"{place}/point"
        if "fill" in kinds:
            point = stack.enter_context(mounted("ext4")).point
        os.makedirs(f"{point}/job")
        os.makedirs(f"{place}/stage")
        yield Bed(point, place, kinds, skipped)


class Soak:
    """All parts of one soak.

    Args:
        plan: What it is.
        where: Where it runs.
    """

    def __init__(self, plan: Plan, where: Bed) -> None:
        self._plan, self._bed, self._backs = plan, where, []
        self.parts = {part.name: part for part in self._make()}
        terms = Terms(
            plan.seconds, plan.gap, plan.ttl, plan.names, plan.spared, plan.seconds / 3, where.kinds
        )
        acts: list[Act] = schedule(plan.seed, terms)
        self.chaos = Chaos(acts, self.parts, where.job, where.point, self._backs.append)
        self.versions, self.samples = Versions(where.job), Samples()
        self.wrong: list[str] = []
        self.converged = 0.0

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

    def _look_on(self, seconds: float) -> None:
        began, sampled, told = time.monotonic(), float("-inf"), 0.0
        while (at := time.monotonic() - began) < seconds:
            self._tend()
            if at - sampled >= self._plan.sample:
                sampled = at
                pids = {name: part.pid for name, part in self.parts.items()}
                self.samples.take(at, self._bed.job, pids)
            if at - told >= _TELL_EVERY:
                told = at
                seen = f"{self.versions.seen} versions, {sum(self.chaos.done.values())} disturbances"
                print(
                    f"{at:.0f} s: {seen}, {len(self.versions.wrong)} violations", file=sys.stderr, flush=True
                )
            time.sleep(0.1)

    def _tend(self) -> None:
        for part in self.parts.values():
            part.tend()

    def _until(self, holds: Any, what: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > ends:
                self.wrong.append(f"waited {PATIENCE:g} s in vain for {what}")
                return
            self._tend()
            time.sleep(0.1)

    def _settle(self) -> None:
        """Left alone, the trainer ends, its last step is published, and every explorer runs it."""
        began = time.monotonic()
        self._until(lambda: all(part.pid for part in self.parts.values()), "all parts to be there again")
        self.parts[TRAINER].end(PATIENCE)
        job = self._bed.job
        self._until(lambda: checker.pair(job)[1] == checker.marker(job), "the last step to be published")
        self._until(lambda: all(self._applied(name) == checker.pair(job) for name in self._plan.names),
                    "every explorer to run the last version")  # fmt: skip
        self.converged = time.monotonic() - began
        past = checker.Past(self.versions.pair)
        self.versions.end(PATIENCE)
        for part in self.parts.values():
            part.end(PATIENCE)
        self.wrong += checker.problems(job, past)

    def _applied(self, name: str) -> checker.Pair | None:
        try:
            with open(f"{self._bed.job}/.syncd/explorers/{name}.json", encoding="utf-8") as file:
                applied = json.load(file)["applied"]
        except (OSError, ValueError):
            return None
        return applied and (applied["generation"], applied["step"])

    def _make(self) -> Iterator[Part]:
        plan, where = self._plan, self._bed
        with open(f"{where.place}/daemon.toml", "w", encoding="ascii") as file:
            file.write(f"[daemon]\nevents_bytes = {EVENTS_BYTES}\nttl = {plan.ttl}\n{_SETTINGS}")
            file.write(f"takeover = {plan.takeover}\n")
        for name in DAEMONS:
            textfile = ("--metrics-textfile", f"{where.place}/{name}.prom")
            config = ("--config", f"{where.place}/daemon.toml", "--log-format", "json", *textfile)
            yield self._part(name, "-m", "syncd", "watch", where.job, *config)
        ttl = ("--ttl", str(plan.ttl))
        trains = (f"{TESTS}/programs/soak_trainer.py", where.job, where.journal(TRAINER))
        yield self._part(TRAINER, *trains, "--pause", str(plan.pause), *ttl)
        for number, name in enumerate(plan.names):
            explores = (f"{TESTS}/programs/soak_explorer.py", where.job, name, where.journal(name))
            staged = ("--stage", f"{where.place}/stage") if number % 2 else ()
            # Some are slower than the trainer: only their leases keep what they read.
            hold = str(plan.slow if number % 4 == 2 else 0.1)
            yield self._part(name, *explores, *ttl, *staged, "--hold", hold)

    def _part(self, name: str, *argv: str) -> Part:
        alone = ["unshare", "--mount", "--propagation", "slave"] if "cut" in self._bed.kinds else []
        environment = os.environ | {"PYTHONPATH": f"{os.path.dirname(TESTS)}:{TESTS}", "PYTHONHASHSEED": "0"}
        environment |= {"XDG_RUNTIME_DIR": self._bed.place}

        def command() -> list[str]:
            back = ["--back", str(self._backs.pop())] if name == TRAINER and self._backs else []
            return [*alone, sys.executable, *argv, *back]

        return Part(name, command, self._bed.log(name), environment)

    # --- what it comes to -------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return all figures, and under `wrong` everything that must not be."""
        plan = self._plan
        disturbances = self.chaos.disturbances
        loads = [
            judging.loads_of(
                name,
                _lines(self._bed.journal(name)),
                [one for one in disturbances if one.who == name],
                plan.ttl,
            )
            for name in plan.names
        ]
        trained = _lines(self._bed.journal(TRAINER))
        logs = {name: _lines(self._bed.log(name)) for name in DAEMONS}
        trends, grown = self._trends()
        return {
            "seed": plan.seed,
            "seconds": round(plan.seconds),
            "explorers": plan.explorers,
            "not_done": self._bed.skipped,
            "done": dict(sorted(self.chaos.done.items())),
            "starts": {name: part.starts for name, part in self.parts.items()},
            "announced": sum(line["event"] == "announced" for line in trained),
            "rewinds": sum(line["event"] == "rewound" for line in trained),
            "saves_failed": sum(line["event"] == "failed" for line in trained),
            "versions": self.versions.seen,
            "overtaken": self.versions.overtaken,
            "pair": self.versions.pair,
            "terms": sum(event["event"] == "leading" for log in logs.values() for event in log),
            "fenced": sum(event["event"] == "fenced" for log in logs.values() for event in log),
            "removed": sum(event["event"] == "step_removed" for log in logs.values() for event in log),
            "loads": sum(one.loads for one in loads),
            "loaded_bytes": sum(one.bytes for one in loads),
            "excused": sum(one.excused for one in loads),
            "settled_after": round(self.converged, 1),
            "trends": trends,
            "highest": {f"{a} {b}": value for (a, b), value in sorted(self.samples.highest.items())},
            "wrong": [
                *self.wrong,
                *self.versions.wrong,
                *self.chaos.wrong,
                *(end for part in self.parts.values() for end in part.ends),
                *(line for one in loads for line in one.wrong),
                *judging.leaders(logs),
                *self._tracebacks(),
                *self._unbounded(),
                *grown,
            ],
        }

    def _trends(self) -> tuple[dict[str, Any], list[str]]:
        shown, grown = {}, []
        judged = [(name, what, most) for name in self._plan.spared for what, most in ALLOWED.items()]
        judged += [("job", what, most) for what, most in KEPT.items()]
        for name, what, most in judged:
            found = trend(self.samples.series[name, what])
            if found is None:
                continue
            shown[f"{name} {what}"] = {"middle": found.middle, "growth": round(found.growth, 1)}
            if found.seconds >= JUDGED_FROM and not is_flat(found, most):
                grown.append(f"{name} {what} grew by {found.growth:.0f} in {found.seconds:.0f} s")
        return shown, grown

    def _unbounded(self) -> list[str]:
        # A line that begins below the limit may end above it; three rotated files and the present one.
        highest, most = self.samples.highest, EVENTS_BYTES + (64 << 10)
        bounds = {"events_longest": most, "events_bytes": 4 * most, "trash_steps": 60, "steps": 60}
        return [f"{what} reached {highest['job', what]:g}, the bound is {bound}"
                for what, bound in bounds.items() if highest["job", what] > bound]  # fmt: skip

    def _tracebacks(self) -> list[str]:
        found = []
        for name in self.parts:
            with open(self._bed.log(name), encoding="utf-8", errors="replace") as file:
                text = file.read()
            at = text.find("Traceback (most recent call last)")
            found += [f"{name}: {text[at : at + 3000]}"] if at >= 0 else []
        return found


def _lines(path: str) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; a process that was killed may have left half a one."""
    found = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict) and "event" in document:
                    found.append(document)
    return found


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
