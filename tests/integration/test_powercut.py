"""Power cuts on ext4 and xfs: the disk stops at each system call of a publish; what it holds is looked at."""

import os
import re
import shutil

import pytest
from beds.loop import mounted
from support import checker
from support.forked import run_forked
from support.processes import (
    FULL,
    LEASED,
    NEWEST,
    PAST,
    PUBLISHED,
    copy_of,
    daemon,
    damaged,
    goes_on,
    must,
    write_steps,
)
from support.sweep import KILL, Target, disturb, points

pytestmark = [
    pytest.mark.group("mounts"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("strace_injection"),
]

SYNCED = "" if FULL else "^(fsync|rename)"
"""Before which calls the power is cut: between two syncs nothing new is durable."""

SHARES = {"ext4": slice(0, None, 4), "xfs": slice(2, None, 4)}
"""Of those calls, what each file system meets in `make test`; `make test-faults` has all of them on both."""


def writer_target(start, *options):
    """A writer that adds step 2."""

    def resume(job):
        must(write_steps(job, 2, 3), run_forked)
        return checker.problems(job) + damaged(job, 1, 2, 3)

    return Target(
        name="a writer",
        prepare=copy_of(start),
        command=lambda job: write_steps(job, 2, 2, *options),
        check=lambda job, _: checker.problems(job) + damaged(job, 1),
        resume=resume,
    )


def daemon_target(start):
    """A daemon that publishes step 7, prunes and empties the trash."""

    return Target(
        name="the daemon",
        prepare=copy_of(start),
        command=lambda job: daemon(job, "--once"),
        check=lambda job, _: checker.problems(job, PAST) + damaged(job, LEASED, PUBLISHED, NEWEST),
        resume=goes_on,
    )


def cut_everywhere(kind, target, where=""):
    """Cut the power before each call of a run and after its end; return how often, and what was wrong."""
    chosen = [point for point in points(target) if re.search(where, str(point))]
    return cut_before(kind, target, chosen if FULL else chosen[SHARES[kind]])


def cut_before(kind, target, chosen):
    wrong, cuts = [], [*chosen, None]
    with mounted(kind) as loop:
        for number, point in enumerate(cuts):
            job = f"{loop.point}/job{number}"
            os.mkdir(job)
            target.prepare(job)
            loop.sync()
            outcome = stop_at(target.command(job), point, f"{os.path.dirname(loop.image)}/trace", job)
            loop.cut_and_remount()
            found = target.check(job, outcome) or target.resume(job)
            wrong += [f"before {point or 'the end'}: {problem}" for problem in found]
            shutil.rmtree(job)
    return len(cuts), wrong


def stop_at(command, point, log, job):
    if point is None:
        must(command)
        return None
    outcome = disturb(command, point, KILL, log, job)
    assert outcome.met, f"{point} was not reached"
    return outcome


def test_no_announced_step_is_damaged_by_a_power_cut(loop_kind, one_step, record_line):
    cuts, wrong = cut_everywhere(loop_kind, writer_target(one_step), where=SYNCED)
    record_line(f"power cuts on {loop_kind}, a writer: {cuts} cuts, {len(wrong)} problems")
    assert not wrong, "\n".join(wrong)


def test_no_published_version_is_damaged_by_a_power_cut(loop_kind, busy, record_line):
    cuts, wrong = cut_everywhere(loop_kind, daemon_target(busy), where=SYNCED)
    record_line(f"power cuts on {loop_kind}, the daemon: {cuts} cuts, {len(wrong)} problems")
    assert not wrong, "\n".join(wrong)


def test_power_cuts_find_a_writer_that_does_not_sync_its_shards(loop_kind, one_step):
    target = writer_target(one_step, "--break", "no-fsync")
    chosen = [point for point in points(target) if re.search("manifest|latest", str(point))]
    _, wrong = cut_before(loop_kind, target, chosen)
    assert any("bytes of" in problem for problem in wrong)
