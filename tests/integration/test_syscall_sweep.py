"""The sweep: writer and daemon are killed, or given an error, at each system call that changes a job."""

import subprocess

import pytest
from support import checker
from support.forked import run_forked
from support.processes import (
    FULL,
    LEASED,
    NEWEST,
    PAST,
    PROGRAMS,
    PUBLISHED,
    copy_of,
    daemon,
    damaged,
    dishonest,
    goes_on,
    must,
    syncd,
    unequal,
    write_steps,
)
from support.sweep import ENVIRONMENT, ERRORS, KILL, LASTING, Target, python, sweep

EVERY_FAULT = (KILL, *ERRORS, LASTING)
IN_TURN = tuple(fault for error in ERRORS for fault in (KILL, error))
"""What each call of a writer meets in `make test`, in turn: SIGKILL at every second call, an error at the others."""

EVERY = 1 if FULL else 8
"""Which calls of the daemon meet a fault: all, or every eighth one, SIGKILL here and an error while it watches."""

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("strace_injection"),
]


def writer_target(start, *options):
    """A writer that adds step 2 to a job that has step 1."""

    def resume(job):
        must(write_steps(job, 2, 3), run_forked)
        return checker.problems(job) + damaged(job, 1, 2, 3) + unequal("the marker", checker.marker(job), 3)

    return Target(
        name="a writer",
        prepare=copy_of(start),
        command=lambda job: write_steps(job, 2, 2, *options),
        check=lambda job, outcome: checker.problems(job) + dishonest(outcome) + damaged(job, 1),
        resume=resume,
    )


def daemon_target(start):
    """A daemon that takes over, publishes, prunes and empties the trash."""

    def check(job, outcome):
        # The step of the last version and the leased one stay, whatever happens.
        return checker.problems(job, PAST) + dishonest(outcome) + damaged(job, LEASED, PUBLISHED, NEWEST)

    return Target("the daemon", copy_of(start), lambda job: daemon(job, "--once"), check, goes_on)


def watching_target(start):
    """A daemon that is not started again: one error at any call is a delay to it, not an end."""

    def check(job, outcome):
        found = checker.problems(job, PAST) + damaged(job, LEASED, NEWEST)
        found += unequal("the version", checker.pair(job), (1, NEWEST))
        # A fault that lands at a read beside its call has the step before the newest published first.
        found += damaged(job, checker.version(job)["previous"]["step"])
        return found + unequal("the exit status", outcome.status, 0) + dishonest(outcome)

    def command(job):
        return python(f"{PROGRAMS}/watch_until.py", job, str(NEWEST), *daemon(job)[2:])

    return Target("a watching daemon", copy_of(start), command, check, goes_on, steady=False)


def assert_clean(result, record_line):
    record_line(result.line())
    assert not result.problems, "\n".join(result.problems[:20])
    # A fault that lands beside its call is a fault all the same; too many of them would leave calls out.
    assert len(result.drifted) <= max(1, result.runs // 100), "\n".join(result.drifted[:20])


@pytest.mark.fault("the ready mark is visible before its data")
def test_a_writer_disturbed_at_any_call_leaves_a_complete_step_or_none(one_step, record_line):
    target = writer_target(one_step)
    result = sweep(target, EVERY_FAULT) if FULL else sweep(target, (), IN_TURN)
    assert len(result.points) > 30
    assert_clean(result, record_line)


def test_a_daemon_disturbed_at_any_call_keeps_the_job_consistent(busy, record_line):
    result = sweep(daemon_target(busy), EVERY_FAULT if FULL else (KILL,), every=EVERY)
    assert len(result.points) > 30
    assert_clean(result, record_line)


def test_a_watching_daemon_survives_an_error_at_any_call(busy, record_line):
    target = watching_target(busy)
    result = sweep(target, ERRORS if FULL else (), () if FULL else ERRORS, workers=4, every=EVERY)
    record_line(result.line())
    assert len(result.points) > 30
    assert not result.problems, "\n".join(result.problems[:20])


def test_the_sweep_finds_a_writer_that_writes_the_marker_first(one_step):
    result = sweep(writer_target(one_step, "--break", "marker-first"), (KILL,), where="manifest")
    assert any("the marker names step 2" in problem for problem in result.problems)


def test_the_sweep_finds_a_writer_that_writes_in_place(one_step):
    result = sweep(writer_target(one_step, "--break", "in-place"), (KILL,), where="manifest|latest")
    assert any("marker" in problem for problem in result.problems), result.problems


@pytest.mark.parametrize(("option", "code"), [("--once", 74), ("--onc", 2)])
def test_an_error_keeps_its_exit_code_if_stderr_cannot_be_written(tmp_path, option, code):
    with open("/dev/full", "w", encoding="ascii") as full:
        command = syncd("watch", f"{tmp_path}/none", option)
        assert subprocess.run(command, stderr=full, env=ENVIRONMENT, check=False).returncode == code
