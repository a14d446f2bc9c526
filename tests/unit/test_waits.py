"""Waits: what ends one early always reaches its caller's own clean-up, in a thread and for asyncio."""

import asyncio
import threading
import time

import pytest
from support.jobs import ManualClock

from syncd.client.aio import run
from syncd.client.wait import PATIENCE, Deadline, Pace, Poller, WaitCancelledError, cancelled_by
from syncd.errors import StorageError, TimedOutError, UsageError
from syncd.protocol.local_disk import SystemClock


@pytest.fixture
def clock():
    return ManualClock()


def poller(clock, poll=0.3, timeout=3600.0, hint=None):
    return Poller(clock, Pace("/", poll), timeout, hint)


def waiting(log, rounds, clock=None):
    """Wait for a number of polls, and note each, and the end however it comes."""

    def poll():
        log.append(len(log))
        return "result" if len(log) == rounds else None

    try:
        return poller(clock or SystemClock(), 0.001).until(poll, "it")
    finally:
        log.append("restored")


def test_a_wait_returns_the_result_in_a_thread_and_for_asyncio(clock):
    for wait in (lambda log: waiting(log, 2, clock), lambda log: asyncio.run(run(waiting, log, 2))):
        log = []
        assert wait(log) == "result"
        assert log == [0, 1, "restored"]


def test_an_exception_during_a_sleep_runs_the_clean_up(clock, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    log = []
    monkeypatch.setattr(clock, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        waiting(log, 5, clock)
    assert log == [0, "restored"]


def test_a_cancel_event_ends_a_wait_and_runs_the_clean_up():
    log, cancel = [], threading.Event()
    threading.Timer(0.05, cancel.set).start()
    with pytest.raises(WaitCancelledError), cancelled_by(cancel):
        waiting(log, 10**9)
    assert log[-1] == "restored"


def test_a_cancel_event_ends_a_long_sleep_at_once():
    cancel = threading.Event()
    threading.Timer(0.05, cancel.set).start()
    with pytest.raises(WaitCancelledError), cancelled_by(cancel):
        poller(SystemClock(), 10**6).until(lambda: None, "it")  # longer than pytest lets a test take


def test_asyncio_cancellation_runs_the_clean_up_first():
    async def main():
        log = []
        task = asyncio.create_task(run(waiting, log, 10**9))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log[0] == 0
        assert log[-1] == "restored"

    asyncio.run(main())


def test_asyncio_cancellation_waits_for_a_running_poll():
    def slow(log):
        def poll():
            time.sleep(0.1)
            log.append("polled")

        try:
            poller(SystemClock(), 10.0).until(poll, "it")
        finally:
            log.append("restored")

    async def main():
        log = []
        task = asyncio.create_task(run(slow, log))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["polled", "restored"]

    asyncio.run(main())


def test_many_concurrent_waits_leave_the_default_thread_pool_free():
    async def main():
        logs = [[] for _ in range(64)]
        tasks = [asyncio.create_task(run(waiting, log, 10**9)) for log in logs]
        assert await asyncio.wait_for(run(lambda: "free"), 30.0) == "free"
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert {log[-1] for log in logs} == {"restored"}

    asyncio.run(main())


def test_an_error_of_work_in_a_thread_is_raised():
    def fails():
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        asyncio.run(run(fails))


def test_the_last_poll_is_at_the_deadline(clock):
    polls = []

    def poll():
        polls.append(clock.at)
        return "late" if clock.at >= 1001.0 else None

    assert poller(clock).until(poll, "it", 1.0) == "late"
    assert polls[-1] == 1001.0


def test_a_time_out_names_the_subject_and_a_hint(clock):
    with pytest.raises(TimedOutError, match="waiting: timed out after 1 s") as caught:
        poller(clock, hint="run it").until(lambda: None, "waiting", 1.0)
    assert caught.value.hint == "run it"


def test_transient_failures_are_retried_and_lasting_ones_raised(clock):
    def poll():
        if clock.at < end:
            raise OSError(5, "Input/output error", "/job")
        return "there"

    end = 1000.0 + PATIENCE / 2
    assert poller(clock, 1.0).until(poll, "it") == "there"
    end = clock.at + 2 * PATIENCE
    with pytest.raises(StorageError, match="Input/output"):
        poller(clock, 1.0).until(poll, "it")
    assert clock.at < end


def test_a_time_out_after_failures_names_the_failure(clock):
    def poll():
        raise OSError(5, "Input/output error", "/job")

    with pytest.raises(TimedOutError) as caught:
        poller(clock, 1.0).until(poll, "it", 2.0)
    assert isinstance(caught.value.__cause__, StorageError)


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_an_infinite_or_invalid_deadline_is_refused(clock, seconds):
    with pytest.raises(UsageError):
        Deadline(clock, seconds)


def test_the_polling_interval_is_jittered_on_network_mounts_only(monkeypatch):
    assert {Pace("/", 0.5).next() for _ in range(20)} == {0.5}
    monkeypatch.setattr("syncd.client.wait.mount_of", lambda path: type("M", (), {"is_network": True}))
    sleeps = {Pace("/").next() for _ in range(50)}
    assert len(sleeps) > 10
    assert all(0.2 <= seconds <= 0.3 for seconds in sleeps)
    monkeypatch.setattr("syncd.client.wait.mount_of", lambda path: type("M", (), {"is_network": False}))
    assert Pace("/").next() == 0.01
