"""The disk is full from each call on: nothing breaks, and the job goes on by itself once there is room again."""

import contextlib
import os
import shutil
import subprocess
import tempfile

import pytest
from beds import probe
from support import checker
from support.forked import run_forked
from support.processes import (
    FULL,
    LEASED,
    NEWEST,
    NEXT,
    PAST,
    PROGRAMS,
    PUBLISHED,
    copy_of,
    daemon,
    damaged,
    dishonest,
    goes_on,
    must,
    unequal,
    write_steps,
)
from support.sweep import Target, fill_up, moments, python, run

EVERY = 1 if FULL else 12
"""Each moment, or every twelfth: `SYNCD_SEED` says from which on."""

START = int(os.environ.get("SYNCD_SEED", "1"))
REFUSED = 3
PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = [
    pytest.mark.group("mounts"),
    pytest.mark.sweep,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


def part_of(found):
    return found[START % EVERY :: EVERY]


def report(result, found, record_line):
    record_line(result.line())
    assert len(found) > 15
    assert result.runs
    assert not result.problems, "\n".join(result.problems[:20])


@pytest.mark.usefixtures("strace_injection")
def test_a_writer_on_a_disk_full_from_any_call_leaves_a_complete_step_or_none(one_step, record_line):
    def resume(job):
        must(write_steps(job, 2, 3), run_forked)
        return checker.problems(job) + damaged(job, 1, 2, 3) + unequal("the marker", checker.marker(job), 3)

    target = Target(
        "a writer on a full disk",
        copy_of(one_step),
        lambda job: write_steps(job, 2, 2),
        lambda job, outcome: checker.problems(job) + dishonest(outcome) + damaged(job, 1),
        resume,
    )
    found = moments(target)
    report(fill_up(target, part_of(found), None), found, record_line)


@pytest.mark.usefixtures("strace_injection")
def test_a_daemon_on_a_disk_full_from_any_call_resumes_with_space(busy, record_line):
    """It is not started again: it publishes, prunes and ends in good order after the calls that failed."""

    def check(job, outcome):
        found = checker.problems(job, PAST) + damaged(job, LEASED, PUBLISHED, NEWEST)
        found += unequal("the version", checker.pair(job), (1, NEWEST))
        return found + unequal("the exit status", outcome.status, 0) + dishonest(outcome)

    def command(job):
        return python(f"{PROGRAMS}/watch_until.py", job, str(NEWEST), *daemon(job)[2:])

    target = Target("a daemon on a full disk", copy_of(busy), command, check, goes_on, steady=False)
    found = moments(target)
    report(fill_up(target, part_of(found), REFUSED, workers=8), found, record_line)


# --- a real disk without room ------------------------------------------------------------------------------------

SIZE = "size=2m"
FREE = range(33) if FULL else (0, 1, 2, 5, 13)
"""How many pages are free when the daemon starts: each of its first calls is the one that finds none."""


@contextlib.contextmanager
def full_disk(start, free):
    """Copy a job onto a file system of its own on which so many pages are free; yield the job."""
    if (reason := probe.tmpfs(SIZE)) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="full-") as point:
        subprocess.run(["mount", "-t", "tmpfs", "-o", SIZE, "tmpfs", point], check=True, timeout=60)
        try:
            shutil.copytree(start, f"{point}/job", symlinks=True)
            take_room(point, free)
            yield f"{point}/job"
        finally:
            subprocess.run(["umount", "-l", point], check=True, timeout=60)


def take_room(point, free):
    with open(f"{point}/filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while os.statvfs(point).f_bavail > free:
            filler.write(b"x" * PAGE)


def made_room(start, free):
    """Return what is wrong after a daemon has watched a job on a disk that nobody else makes room on."""
    with full_disk(start, free) as job:
        command = python(f"{PROGRAMS}/watch_until.py", job, str(NEWEST), *daemon(job)[2:])
        done = run(command, timeout=200)
        found = unequal("the version", checker.pair(job), (1, NEWEST)) + checker.problems(job, PAST)
        found += damaged(job, LEASED, PUBLISHED, NEWEST) + unequal("the exit status", done.returncode, 0)
        written = run_forked(write_steps(job, NEXT, NEXT))
        found += unequal("the exit status of a writer in the room that was made", written.returncode, 0)
        return [f"{free} pages free: {problem}\n{done.stderr[-1000:]}" for problem in found]


def test_a_daemon_frees_space_by_emptying_the_trash_and_pruning(busy, record_line):
    """A leader that died has left a trash; what it holds is all the room there is."""
    wrong = [problem for free in FREE for problem in made_room(busy, free)]
    record_line(
        f"a daemon on a disk with 0 to {FREE[-1]} pages free: {len(FREE)} runs, {len(wrong)} problems"
    )
    assert not wrong, "\n".join(wrong[:10])
