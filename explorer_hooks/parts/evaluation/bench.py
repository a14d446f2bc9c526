"""`explorer bench`: measures the steps of a job and the model that it started from, and ends by itself."""

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from explorer_hooks.follower.policy import TurnOutcome
from explorer_hooks.parts.evaluation.evaluation import PromptEvaluator, measure
from explorer_hooks.parts.evaluation.sets import open_sets
from explorer_hooks.run.generation import BEFORE_THE_FIRST, Sampling
from explorer_hooks.run.held_out import Evaluator, HeldOut
from explorer_hooks.run.open_explorer import FollowedEngine, followed_engine, open_reward
from explorer_hooks.run.own_files import EVALUATIONS, Records, own_path
from explorer_hooks.run.tokens import hide_progress_bars, open_tokens
from explorer_hooks.stopping import Stop
from syncd.errors import CorruptDataError, SyncdError, TryAgainError
from syncd.jobfile.model import JobFile
from syncd.jsonl import read
from syncd.observe import log
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Pair

BASE = 0  # the step that stands for the model that the job started from
_PAUSE = 1.0  # seconds until a load that failed is tried again

_AGAIN = ("failed", "unreachable")
_LOG = structlog.get_logger()

Line = Mapping[str, Any]  # a line of evaluations.jsonl

LinePlace = tuple[str, str, int, str]
"""What a line measured: set, key, step, and the digest of the step or the path of another base."""

StepState = Literal["measured", "gone", "damaged", "failed"]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    steps: Sequence[int] | None = None  # the steps; None for all that are complete
    base: bool = True  # whether the model that the job started from is measured, too
    sets: Collection[str] = ()  # the names of the sets; none for all
    again: bool = False  # whether what was measured before is measured again
    base_path: str = ""  # where the base is if that is not what the job's file says; empty if it is

    def wants(self, name: str) -> bool:
        return not self.sets or name in self.sets


@dataclass(slots=True)
class BenchStep:
    step: int  # the step; `BASE` for the model that the job started from
    # measured; gone: it was removed; damaged: or it does not fit the engine; failed: it was not loaded.
    state: StepState = "measured"
    reason: str = ""  # why it was not measured
    lines: dict[str, Line] = field(default_factory=dict)  # its figures by the name of the set
    # The sets that were measured before, by this or another explorer.
    recorded: set[str] = field(default_factory=set)


def bench(file: JobFile, request: BenchRequest) -> list[BenchStep]:
    """Measure steps as a file says, and return what was found, in the order of steps."""
    log.configure(file.explorer.log, sys.stderr)
    hide_progress_bars()
    file = file.with_values(sync={"method": "checkpoint"})  # no broadcasts: it reads steps
    with Stop().on_signals() as stop, _opened(file, request, stop) as (followed, sets, evaluator):
        run = BenchRun(followed, sets, evaluator, request)
        steps = []
        for step in run.steps():
            steps.append(run.step(step))
            if stop():
                hint = "give the same command again: what was measured stays"
                raise TryAgainError(f"stopped at step {step}", path=file.job.dir, hint=hint)
    if not any(step.lines for step in steps):
        why = next(
            (f"step {step.step} is {step.state}: {step.reason}" for step in steps),
            "there is no step to measure",
        )
        raise CorruptDataError(f"nothing could be measured; {why}", path=file.job.dir)
    return steps


@contextmanager
def _opened(
    file: JobFile, request: BenchRequest, stop: Stop
) -> Iterator[tuple[FollowedEngine, Sequence[HeldOut], Evaluator]]:
    tokens = open_tokens(file.model.path, trust_remote_code=file.model.trust_remote_code)
    with (
        closing(open_reward(file)) as scorer,
        open_sets(file, scorer, lambda name, _: request.wants(name)) as sets,
        followed_engine(file, stop, None, checks_first=True) as followed,
    ):
        follower = followed.follower
        draws = f"{file.job.seed}/{follower.client.identity}/bench"
        generator = followed.generator(tokens, lambda: follower.applied or BEFORE_THE_FIRST, draws, stop)
        generator.check()
        yield followed, sets, PromptEvaluator(Sampling(followed.file, tokens, generator, scorer, stop))


class BenchRun:
    def __init__(
        self, followed: FollowedEngine, sets: Sequence[HeldOut], evaluator: Evaluator, request: BenchRequest
    ) -> None:
        self._follower, self._sets, self._evaluator = followed.follower, sets, evaluator
        self._request, self._retries = request, followed.file.explorer.follow.retries
        client = followed.follower.client
        self._job = client.job
        self._records = Records.own(self._job, client.identity or "", EVALUATIONS)
        self._recorded = {} if request.again else known_lines(self._job)

    def steps(self) -> list[int]:
        asked = self._request.steps
        base = [BASE] if self._request.base else []
        if asked is None:
            asked = [step for step in self._follower.published_steps() if self._digest(step)]
        return [*base, *sorted(set(asked) - {BASE})]

    def step(self, step: int) -> BenchStep:
        """Measure a step by all sets; what was measured before is taken from the files."""
        bench_step, digest = BenchStep(step), self._request.base_path if step == BASE else self._digest(step)
        if step == BASE or digest:
            lines = {
                held_out.name: self._recorded.get((held_out.name, held_out.key, step, digest))
                for held_out in self._sets
            }
            bench_step.lines = {name: line for name, line in lines.items() if line is not None}
            bench_step.recorded = set(bench_step.lines)
        left = [held_out for held_out in self._sets if held_out.name not in bench_step.lines]
        if left:
            self._measure(bench_step, left)
        bench_step.lines = {
            held_out.name: bench_step.lines[held_out.name]
            for held_out in self._sets
            if held_out.name in bench_step.lines
        }
        return bench_step

    def _measure(self, bench_step: BenchStep, left: Iterable[HeldOut]) -> None:
        pair = self._started(bench_step) if bench_step.step == BASE else self._loaded(bench_step)
        if pair is None:
            _LOG.warning(
                "step_skipped", step=bench_step.step, state=bench_step.state, reason=bench_step.reason
            )
            return
        digest = "" if bench_step.step == BASE else self._follower.client.confirmed_digest
        base = self._request.base_path if bench_step.step == BASE else ""
        more = {"bench": True, **({"base": base} if base else {})}
        for held_out in left:
            line = measure(held_out, pair, digest, self._evaluator, self._records, more)
            if line is None:
                bench_step.state, bench_step.reason = (
                    "failed",
                    f"the engine did not keep to it while {held_out.name} ran",
                )
            else:
                bench_step.lines[held_out.name] = line
                _LOG.info("step_measured", **{name: value for name, value in line.items() if name != "at"})

    def _started(self, bench_step: BenchStep) -> Pair | None:
        """Return the version before the first if the engine runs it."""
        label = self._follower.running().label
        if label is None:
            return BEFORE_THE_FIRST
        what = "start it on the model that the job started from, or --no-base"
        bench_step.state, bench_step.reason = "failed", f"the engine runs {label}; {what}"
        return None

    def _loaded(self, bench_step: BenchStep) -> Pair | None:
        outcome = self._follower.load_step(bench_step.step)
        for _ in range(self._retries):
            if outcome.kind not in _AGAIN:
                break
            time.sleep(_PAUSE)
            outcome = self._follower.load_step(bench_step.step)
        if outcome.kind != "applied":
            bench_step.state, bench_step.reason = _state(outcome), outcome.reason
            return None
        return outcome.pair

    def _digest(self, step: int) -> str:
        """Return the digest of a step, empty if it is not complete or was removed."""
        with suppress(*MISSING, SyncdError):
            newest = self._follower.client.latest_version()
            if newest is not None and newest.step == step:
                return newest.digest
            return read_manifest(self._job.disk, self._job.step(step)).digest
        return ""


def known_lines(job: Job) -> dict[LinePlace, Line]:
    """Return the lines of all explorers by what they measured; of several ones the newest."""
    lines: list[Line] = []
    with suppress(OSError):
        for entry in job.disk.list(f"{job.root}/explorers"):
            with suppress(OSError):
                lines += [line for line in read(own_path(job, entry.name, EVALUATIONS)) if line]
    return {_place(line): line for line in sorted(lines, key=_time)}


def _place(line: Line) -> LinePlace:
    step = line.get("step")
    of_set, key, digest, base = (str(line.get(name, "")) for name in ("set", "key", "digest", "base"))
    return of_set, key, step if type(step) is int else -1, digest or base


def _time(line: Line) -> float:
    at = line.get("at")
    return float(at) if isinstance(at, int | float) else 0.0


def _state(outcome: TurnOutcome) -> StepState:
    if outcome.kind == "gone":
        return "gone"
    return "damaged" if outcome.kind == "refused" else "failed"
