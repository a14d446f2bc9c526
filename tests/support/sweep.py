"""Kills or fails a real process at each system call with which it changes a job, and looks at what is left.

strace counts the calls of an undisturbed run; then each of them is made the last one of a run (SIGKILL
instead of the call), or fails with an errno. Whatever is left is checked, the command is started again
undisturbed, and that must bring the job on. Start-up is the same in each run, so "the 17th fsync" is the same
call in each; the call that was really hit is read from the trace all the same.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.paths import PYTHONPATH

# Every call that changes a file, a name or what is durable, and those that a libc may use in their place.
CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,truncate,ftruncate,fallocate,"
    "fsync,fdatasync,sync_file_range,syncfs,sync,rename,renameat,renameat2,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat,link,linkat,symlink,symlinkat,chmod,fchmod,fchmodat,openat,open,creat"
)
_OPENS = ("openat", "open")
KILL = "KILL"
ERRORS = ("ENOSPC", "EIO", "ESTALE")
LASTING = "ENOSPC+"
"""From this call on every call of that name fails, as on a disk that stays full."""

_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
_RANDOM = re.compile(r"(?<=[.-])[0-9a-f]{8,32}\b|(?<=/)[0-9a-f]{32}\b")


@dataclass(frozen=True)
class Point:
    """The `when`-th call of a name in a run, and where it goes (random parts of names left out)."""

    call: str
    when: int
    target: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.call}#{self.when} {self.target}"


@dataclass(frozen=True)
class Outcome:
    """How one disturbed run ended: its exit status, whether the fault was met and at which target."""

    status: int
    met: bool
    target: str
    stderr: str


@dataclass(frozen=True)
class Target:
    """What is swept.

    Args:
        name: For the record.
        prepare: Makes the starting state in a new, empty directory.
        command: Returns the command over that directory.
        check: Returns what is wrong with the state that a disturbed run has left.
        resume: Brings the job on undisturbed and returns what is wrong then.
        steady: Its calls come in the same order in each run; a fault met beside its call is tried again.
    """

    name: str
    prepare: Callable[[str], None]
    command: Callable[[str], list[str]]
    check: Callable[[str, Outcome], list[str]]
    resume: Callable[[str], list[str]]
    steady: bool = True


@dataclass
class Result:
    """What a sweep found."""

    name: str
    points: list[Point]
    faults: str
    runs: int = 0
    drifted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the record of the sweep in one line."""
        return (
            f"sweep of {self.name}: {len(self.points)} system calls x {self.faults}: {self.runs} runs, "
            f"{len(self.problems)} problems, {len(self.drifted)} faults not met where expected"
        )


ENVIRONMENT = os.environ | {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": PYTHONPATH,
}


def python(*arguments: str) -> list[str]:
    """Return the command line of this interpreter."""
    return [sys.executable, *arguments]


def run(command: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command undisturbed."""
    return subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout, check=False
    )


def points(target: Target) -> list[Point]:
    """Return every point of an undisturbed run at which it changes something below its directory."""
    with copied(target) as (place, log):
        done = _traced(target.command(place), log, "--seccomp-bpf")
        if done.returncode != 0:
            raise AssertionError(f"{target.name} fails undisturbed: {done.stderr[-2000:]}")
        return list(_changes(log, place))


def sweep(
    target: Target,
    faults: Sequence[str] = (KILL, *ERRORS),
    in_turn: Sequence[str] = (),
    workers: int = 2,
    where: str = "",
    every: int = 1,
) -> Result:
    """Disturb a target at its points.

    Args:
        target: What is swept.
        faults: SIGKILL or names of errors, each at every point.
        in_turn: More of them, of which each point meets one, in turn.
        workers: Runs at a time.
        where: Take points whose text matches this regular expression only.
        every: Disturb every second point, third, ... of them; the result names all.
    """
    chosen = [point for point in points(target) if re.search(where, str(point))]
    named = [*faults, *(["one of " + "/".join(dict.fromkeys(in_turn))] if in_turn else [])]
    result = Result(target.name, chosen, " and ".join(named) if in_turn else "/".join(named))
    disturbed = chosen[::every]
    cases = [(point, fault) for fault in faults for point in disturbed]
    cases += zip(disturbed, itertools.cycle(in_turn), strict=False)
    with ThreadPoolExecutor(workers) as pool:
        for (point, fault), (outcome, wrong) in zip(
            cases, pool.map(lambda c: _case(target, *c), cases), strict=True
        ):
            result.runs += 1
            if not outcome.met or outcome.target != point.target:
                result.drifted.append(f"{fault} at {point}: {outcome.target or 'not met'}")
            result.problems += [f"{fault} at {point}: {problem}" for problem in wrong]
    return result


def _case(target: Target, point: Point, fault: str) -> tuple[Outcome, list[str]]:
    # Another moment of the machine may shift a count: a fault that was not met, or beside its call, is tried again.
    for _ in range(3):
        with copied(target) as (place, log):
            outcome = disturb(target.command(place), point, fault, log, place)
            wrong = target.check(place, outcome)
            if outcome.met and not wrong:
                wrong = _resumed(target, point, fault, place)
        if wrong or (outcome.met and (outcome.target == point.target or not target.steady)):
            break
    return outcome, wrong


def _resumed(target: Target, point: Point, fault: str, place: str) -> list[str]:
    try:
        return target.resume(place)
    except AssertionError as error:
        error.add_note(f"{target.name} had met {fault} at {point}; the locks: {_locks(place)}")
        raise


def _locks(place: str) -> dict[str, str]:
    """Return the files below the directory of terms, each with what it says."""
    found = sorted(Path(place, ".syncd/daemon.lock").rglob("*"))
    return {str(path): path.read_text(errors="replace") if path.is_file() else "" for path in found}


def disturb(command: list[str], point: Point, fault: str, log: str, place: str) -> Outcome:
    """Run a command that is killed at, or fails with an error in, one of its system calls."""
    if fault == KILL:
        # A signal is delivered only where strace stops at each call by itself: never with --seccomp-bpf.
        done = _traced(command, log, f"--inject={point.call}:signal=KILL:when={point.when}")
    else:
        name, lasting = fault.rstrip("+"), "+" * fault.endswith("+")
        inject = f"--inject={point.call}:error={name}:when={point.when}{lasting}"
        done = _traced(command, log, "--seccomp-bpf", inject)
    return _outcome(done, log, place, fault)


def _traced(command: list[str], log: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run(["strace", "-f", "-y", "-s", "0", "-o", log, "-e", f"trace={CALLS}", *options, *command])


@contextlib.contextmanager
def copied(target: Target) -> Iterator[tuple[str, str]]:
    """Yield a new copy of a target's starting state, and a place for the trace beside it."""
    with tempfile.TemporaryDirectory(
        prefix="sweep-", dir=_fast_directory(), ignore_cleanup_errors=True
    ) as place:
        job = f"{place}/job"
        os.mkdir(job)
        target.prepare(job)
        yield job, f"{place}/trace"


def _fast_directory() -> str | None:
    # What is swept are system calls, not a disk: syncs cost nothing in memory.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def _changes(log: str, place: str) -> Iterator[Point]:
    # strace counts each thread by itself: a number that is small in another thread means start-up in the first.
    first, counts = "", Counter[str]()
    for pid, call, arguments in _lines(log):
        first = first or pid
        counts[call] += pid == first
        if pid == first and _changes_something(call, arguments, place):
            yield Point(call, counts[call], _target(call, arguments, place))


def _changes_something(call: str, arguments: str, place: str) -> bool:
    if place not in arguments:
        return False
    return call not in _OPENS or "O_CREAT" in arguments or "O_TRUNC" in arguments


def _target(call: str, arguments: str, place: str) -> str:
    """Return the file that a call is about, without what differs from run to run."""
    paths = re.findall(rf"{re.escape(place)}(?:/[^\"<>]*)?", arguments)
    if call in _OPENS:
        paths = paths[:1]  # the rest is the descriptor it returned
    shown = [_RANDOM.sub("*", path.removeprefix(place).lstrip("/") or ".") for path in paths]
    return " -> ".join(shown[:2])


def _outcome(done: subprocess.CompletedProcess[str], log: str, place: str, fault: str) -> Outcome:
    last = {}
    for pid, call, arguments in _lines(log):
        last[pid] = _target(call, arguments, place)
        if "(INJECTED)" in arguments:  # the first one: a lasting fault is met again and again
            return Outcome(done.returncode, True, last[pid], done.stderr)
    if fault == KILL:
        with open(log, encoding="utf-8", errors="replace") as file:
            killed = [line.split()[0] for line in file if "killed by SIGKILL" in line]
        if killed:
            return Outcome(done.returncode, True, last.get(killed[0], ""), done.stderr)
    return Outcome(done.returncode, False, "", done.stderr)


def _lines(log: str) -> Iterator[tuple[str, str, str]]:
    with open(log, encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := _CALL.match(line):
                yield match[1], match[2], match[3]


# --- a full disk ------------------------------------------------------------------------------------------------

NEEDS_ROOM = (
    "write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "fallocate", "mkdir",
    "mkdirat", "fsync", "fdatasync",
)  # fmt: skip
"""The calls that a full disk refuses. A file can be made on one, by an inode that is free; opens are left alone."""


@dataclass(frozen=True)
class Moment:
    """A moment of a run: the point that comes next, and how many calls of each name came before it."""

    point: Point
    before: dict[str, int] = field(compare=False)


def moments(target: Target) -> list[Moment]:
    """Return each moment of an undisturbed run right before a call that needs room below its directory."""
    with copied(target) as (place, log):
        done = _traced(target.command(place), log, "--seccomp-bpf")
        if done.returncode != 0:
            raise AssertionError(f"{target.name} fails undisturbed: {done.stderr[-2000:]}")
        counts, found, changes = Counter[str](), [], {(p.call, p.when): p for p in _changes(log, place)}
        first = next(_lines(log))[0]
        for pid, call, _ in _lines(log):
            if pid != first:
                continue
            counts[call] += 1
            point = changes.get((call, counts[call]))
            if point is not None and call in NEEDS_ROOM:
                found.append(Moment(point, {**counts, call: counts[call] - 1}))
        return found


def fill_up(target: Target, chosen: Sequence[Moment], refused: int | None, workers: int = 4) -> Result:
    """Let the disk be full from moments of a run on.

    Args:
        target: What is swept.
        chosen: From when on, one run each.
        refused: After how many refused calls of each name there is room again; None: never in this run.
        workers: Runs at a time.
    """
    end = "for good" if refused is None else f"for {refused} calls of each name"
    result = Result(target.name, [moment.point for moment in chosen], f"ENOSPC {end}")
    with ThreadPoolExecutor(workers) as pool:
        for moment, wrong in zip(
            chosen, pool.map(lambda one: _filled(target, one, refused), chosen), strict=True
        ):
            result.runs += 1
            result.problems += [f"full from {moment.point} on: {problem}" for problem in wrong]
    return result


def _filled(target: Target, moment: Moment, refused: int | None) -> list[str]:
    options = []
    for call in NEEDS_ROOM:
        first = moment.before.get(call, 0) + 1
        when = f"{first}+" if refused is None else f"{first}..{first + refused - 1}"
        options.append(f"--inject={call}:error=ENOSPC:when={when}")
    with copied(target) as (place, log):
        done = _traced(target.command(place), log, "--seccomp-bpf", *options)
        outcome = _outcome(done, log, place, "ENOSPC")
        if not outcome.met:
            return [f"no call was refused: {done.stderr[-500:]}"]
        return target.check(place, outcome) or target.resume(place)
