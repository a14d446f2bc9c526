"""A verb on a mount that does not answer: which calls are noted, how long they are waited for, how the verb ends."""

import signal
import subprocess
import sys
import time

import pytest
from support.cli import environment
from support.jobs import ManualClock

from syncd.protocol.local_disk import LocalDisk
from syncd.stall.calls import SLOWEST, DiskCall, PendingCalls, TrackedDisk
from syncd.stall.verbs import MountVerb
from syncd.stall.worker import CallWait, WorkerThread, watch_calls

LONG = 60

HANGING = """
import time
from contextlib import nullcontext

import click
from syncd import console
from syncd.stall.verbs import MountVerb, pending_calls


@click.command(cls=MountVerb, changes="it hung", cleans_up={cleans_up})
@click.argument("job")
def hang(job):
    click.echo("before")
    with {call}:
        print("begun", flush={flush})
        try:
            while True:
                time.sleep({sleep})
                with pending_calls()("stat", job):
                    pass
        finally:
            with pending_calls()("unlink", job):
                print("cleaned up")


group = click.Group("tests", commands=[hang])
raise SystemExit(console.run(group, "tests", ["hang", "/j", "--patience", "{patience}"]))
"""


def program(call='pending_calls()("list", "/j/x")', **more):
    """Return what starts a verb that hangs."""
    given = {"cleans_up": False, "flush": False, "sleep": 600, "patience": 0.4, **more}
    return [sys.executable, "-c", HANGING.format(call=call, **given)]


def test_calls_that_may_have_changed_the_job_are_recorded():
    calls = PendingCalls(ManualClock())
    with calls("stat", "/outer"):
        assert not calls.may_have_changed
        with calls("mkdir", "/inner"):
            assert calls.oldest().path == "/inner"
        assert (calls.oldest().path, calls.may_have_changed) == ("/outer", True)
    assert calls.oldest() is None


def test_a_cancelled_thread_raises_once_at_its_next_call():
    calls = PendingCalls(ManualClock())
    calls.cancel(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), calls("list", "/j"):
        pass
    assert calls.oldest() is None, "it was not made"
    with calls("unlink", "/j/unfinished"):
        pass


class Scripted:
    """Work that ends after some polls, between which so many seconds pass on a clock."""

    def __init__(self, clock, passing):
        self.clock, self.passing = clock, passing

    def wait(self, _every):
        if not self.passing:
            return True
        self.clock.at += self.passing.pop(0)
        return False


def test_time_of_a_suspended_process_or_host_does_not_count_as_waiting():
    clock = ManualClock()
    calls = PendingCalls(clock)
    calls.begin("stat", "/a")
    waits = list(watch_calls(Scripted(clock, [0.1, 0.3, 3600.0, 0.1]), calls, clock, 0.25))
    assert [wait.waited for wait in waits] == pytest.approx([0.0, 0.3, 0.8, 0.9])
    assert [wait.seconds for wait in waits] == pytest.approx([0.1, 0.4, 3600.4, 3600.5])
    assert waits[-1].elapsed == pytest.approx(3600.5)


def test_each_call_has_its_own_waiting_time():
    clock = ManualClock()
    calls = PendingCalls(clock)
    calls.begin("stat", "/a")
    watching = watch_calls(Scripted(clock, [0.3, 0.3, 0.3, 0.3]), calls, clock, 0.25)
    assert [next(watching).waited for _ in range(2)] == pytest.approx([0.0, 0.3])
    calls.renew("stat", "/b")
    assert [(wait.call.path, wait.waited) for wait in watching] == [("/b", 0.0), ("/b", pytest.approx(0.3))]


def test_each_piece_of_a_large_write_and_its_sync_has_its_own_allowance(tmp_path):
    clock = ManualClock()
    calls, ages, last = PendingCalls(clock), [], []

    class Slow(LocalDisk):
        def replace(self, path, data, **more):
            for _ in data:
                ages.append(calls.age(calls.oldest()))
                clock.at += 100
            last.append(calls.oldest())

    pieces = (b"x" * SLOWEST for _ in range(3))
    TrackedDisk(Slow(), calls).replace(f"{tmp_path}/a", pieces)
    assert ages == [0.0, 0.0, 0.0], "no piece waits for those before"
    assert (last[0].what, last[0].allowance) == ("write", 3.0)
    assert calls.oldest() is None


@pytest.mark.parametrize(
    ("changes", "changed", "said"),
    [
        (None, True, "(list)"),
        ("step {step} is pinned", False, "(list); nothing was changed"),
        ("step {step} is pinned", True, "(list); it is not known whether step 7 is pinned"),
    ],
)
def test_the_error_of_a_stalled_verb_names_what_is_unknown(changes, changed, said):
    wait = CallWait(DiskCall("list", "/j/x", 0.0), 10.0, 10.0, 11.0)
    error = MountVerb("pin", changes=changes)._stuck({"step": 7, "job": "/j"}, wait, changed=changed)
    assert error.message.startswith("the mount has not answered for 10 s, since ")
    assert error.message.endswith(said)
    assert (error.path, error.exit_code) == ("/j/x", 74)
    assert ("syncd status /j" in error.hint) == ("not known" in said)


def test_a_stalled_verb_exits_with_74_and_keeps_its_output():
    began = time.monotonic()
    done = subprocess.run(
        program(), capture_output=True, text=True, timeout=LONG, check=False, env=environment()
    )
    assert (done.returncode, done.stdout) == (74, "before\nbegun\n"), done.stderr
    assert "the mount has not answered for" in done.stderr
    assert "nothing was changed: /j/x" in done.stderr
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize(
    ("number", "cleans_up", "code", "printed"),
    [
        (signal.SIGINT, False, 130, "cleaned up"),
        (signal.SIGTERM, False, -signal.SIGTERM, "begun"),
        (signal.SIGTERM, True, 143, "cleaned up"),
        (signal.SIGHUP, True, 129, "cleaned up"),
    ],
)
def test_a_signal_ends_a_verb_after_its_clean_up(number, cleans_up, code, printed):
    line = program("nullcontext()", flush=True, sleep=0.05, cleans_up=cleans_up)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, text=True, env=environment(), **pipes) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["before\n", "begun\n"]
        process.send_signal(number)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, err) == (code, "")
    assert ("cleaned up" in out) == (printed == "cleaned up")


def test_ctrl_c_ends_a_verb_with_a_hung_call():
    line = program(flush=True, patience=600)
    with subprocess.Popen(
        line, text=True, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["before\n", "begun\n"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert "the mount has not answered for" in err


def test_a_verb_keeps_sigint_ignored():
    line = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *program(flush=True, patience=2)]
    with subprocess.Popen(
        line, text=True, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["before\n", "begun\n"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG)
    assert process.returncode == 74


def test_a_worker_thread_raises_its_error_when_the_result_is_read():
    ended = []
    work = WorkerThread(lambda: 5, ended=lambda: ended.append(True))
    work.start()
    assert work.wait(20)
    assert (work.is_running, work.result()) == (False, 5)
    failing = WorkerThread(lambda: {}["none"])
    failing.start()
    assert failing.wait(20)
    with pytest.raises(KeyError):
        failing.result()
