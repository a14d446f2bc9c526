"""The drivers of waits: what ends a wait early always reaches the wait's own clean-up."""

import asyncio
import time

import pytest
from jobs import ManualClock

from syncd.client.wait import PATIENCE, Deadline, Pace, drive, drive_async, in_thread, until
from syncd.errors import StorageError, TimedOutError, UsageError


@pytest.fixture
def clock():
    return ManualClock()


def waiting(log, rounds):
    try:
        for number in range(rounds):
            log.append(number)
            yield 0.001
        return "result"
    finally:
        log.append("restored")


def test_both_drivers_return_the_result(clock):
    for run in (lambda wait: drive(wait, clock), lambda wait: asyncio.run(drive_async(wait))):
        log = []
        assert run(waiting(log, 2)) == "result"
        assert log == [0, 1, "restored"]


def test_an_exception_in_sleep_restores(clock, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    log = []
    monkeypatch.setattr(clock, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(waiting(log, 5), clock)
    assert log == [0, "restored"]


def test_cancellation_restores_before_it_goes_on():
    async def run():
        log = []
        task = asyncio.create_task(drive_async(waiting(log, 10**9)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log[0] == 0
        assert log[-1] == "restored"

    asyncio.run(run())


def test_cancellation_during_a_look_waits_for_the_look():
    def slow(log):
        try:
            time.sleep(0.1)
            log.append("looked")
            yield 10.0
        finally:
            log.append("restored")

    async def run():
        log = []
        task = asyncio.create_task(drive_async(slow(log)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["looked", "restored"]

    asyncio.run(run())


def test_work_in_a_thread_is_not_abandoned_and_its_error_is_raised():
    def fails():
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        asyncio.run(in_thread(fails))


def test_the_last_look_comes_after_the_deadline(clock):
    looks = []

    def look():
        looks.append(clock.at)
        return "late" if clock.at >= 1001.0 else None

    assert drive(until(look, Deadline(clock, 1.0), Pace("/", 0.3), clock, what="it"), clock) == "late"
    assert looks[-1] == 1001.0


def test_a_wait_times_out_with_what_and_hint(clock):
    wait = until(lambda: None, Deadline(clock, 1.0), Pace("/", 0.3), clock, what="waiting", hint="run it")
    with pytest.raises(TimedOutError, match="waiting: nothing within 1 s") as caught:
        drive(wait, clock)
    assert caught.value.hint == "run it"


def test_passing_failures_are_looked_past_and_lasting_ones_are_raised(clock):
    def look():
        if clock.at < end:
            raise OSError(5, "Input/output error", "/job")
        return "there"

    end = 1000.0 + PATIENCE / 2
    assert drive(until(look, Deadline(clock, 3600.0), Pace("/", 1.0), clock, what="it"), clock) == "there"
    end = clock.at + 2 * PATIENCE
    with pytest.raises(StorageError, match="Input/output"):
        drive(until(look, Deadline(clock, 3600.0), Pace("/", 1.0), clock, what="it"), clock)
    assert clock.at < end


def test_a_time_out_after_failures_names_the_failure(clock):
    def look():
        raise OSError(5, "Input/output error", "/job")

    with pytest.raises(TimedOutError) as caught:
        drive(until(look, Deadline(clock, 2.0), Pace("/", 1.0), clock, what="it"), clock)
    assert isinstance(caught.value.__cause__, StorageError)


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_a_deadline_has_an_end(clock, seconds):
    with pytest.raises(UsageError):
        Deadline(clock, seconds)


def test_the_pace_spreads_on_network_mounts_only(monkeypatch):
    assert {Pace("/", 0.5).next() for _ in range(20)} == {0.5}
    monkeypatch.setattr("syncd.client.wait.mount_of", lambda path: type("M", (), {"is_network": True}))
    sleeps = {Pace("/").next() for _ in range(50)}
    assert len(sleeps) > 10
    assert all(0.2 <= seconds <= 0.3 for seconds in sleeps)
    monkeypatch.setattr("syncd.client.wait.mount_of", lambda path: type("M", (), {"is_network": False}))
    assert Pace("/").next() == 0.01
