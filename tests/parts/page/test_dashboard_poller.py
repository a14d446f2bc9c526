"""One poll at a time for everybody who asks; a poll that never returns blocks nobody."""

import threading
import time

import pytest

from syncd._version import __version__
from syncd.errors import StorageError
from syncd.parts.page import poller
from syncd.parts.page.poller import PollState, SharedPoll
from syncd.protocol.local_disk import SystemClock

LONG = 60.0


class Looks:
    """Looks that end when told, with what they are told."""

    def __init__(self):
        self.began, self.outcomes, self.go = 0, {}, threading.Semaphore(0)
        self.has_begun = threading.Semaphore(0)

    def __call__(self):
        self.began += 1
        number = self.began
        self.has_begun.release()
        assert self.go.acquire(timeout=LONG)
        outcome = self.outcomes.get(number, {"number": number})
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class MovedClock(SystemClock):
    """This host's clock, some time on."""

    ahead = 0.0

    def monotonic(self):
        return super().monotonic() + self.ahead


@pytest.fixture
def looks():
    return Looks()


@pytest.fixture
def clock():
    return MovedClock()


@pytest.fixture
def watch(looks, clock):
    yield lambda every=0.001: SharedPoll(looks, clock, every)
    looks.go.release(100)


def test_polling_starts_with_the_first_request(looks, watch):
    watched = watch()
    assert watched.current(0).state is PollState.STARTING
    assert looks.has_begun.acquire(timeout=LONG), "and then at once"


def test_a_request_waits_for_the_poll_that_is_due(looks, watch):
    watched = watch()
    looks.go.release()
    known = watched.current(LONG)
    assert (known.state, known.document, known.looking_for) == (PollState.FRESH, {"number": 1}, None)
    assert known.age is not None
    assert known.at is not None
    assert abs(known.at - time.time()) < LONG


def test_concurrent_viewers_share_one_poll(looks, watch):
    watched, got = watch(every=3600.0), []
    viewers = [threading.Thread(target=lambda: got.append(watched.current(LONG))) for _ in range(20)]
    for viewer in viewers:
        viewer.start()
    looks.go.release()
    for viewer in viewers:
        viewer.join(LONG)
    assert [known.document for known in got] == [{"number": 1}] * 20
    assert looks.began == 1
    assert watched.current(LONG).document == {"number": 1}, "and it is kept until the next one is due"


def test_a_hung_poll_blocks_no_viewer(looks, watch, clock):
    watched = watch()
    looks.go.release()
    watched.current(LONG)
    assert looks.has_begun.acquire(timeout=LONG)
    assert begins(looks, watched)
    clock.ahead = 125.0
    known = watched.current(LONG)
    assert known.state is PollState.STUCK
    assert known.document == {"number": 1}, "what was known is still said"
    assert known.looking_for >= 125.0
    assert known.age >= 125.0
    assert looks.began == 2, "and no second thread gets stuck beside it"
    looks.go.release(2)
    assert ends_with(watched, PollState.FRESH)


def begins(looks, watched):
    ends = time.monotonic() + LONG
    while time.monotonic() < ends:
        watched.current(0)
        if looks.has_begun.acquire(timeout=0.05):
            return True
    return False


def ends_with(watched, state):
    ends = time.monotonic() + LONG
    while time.monotonic() < ends:
        if watched.current(0.1).state is state:
            return True
    return False


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageError("Input/output error", path="/x"), "Input/output error: /x"),
        (OSError(5, "Input/output error", "/x"), "Input/output error: /x"),
        (ZeroDivisionError("division"), f"a bug in syncd {__version__}: ZeroDivisionError: division"),
    ],
)
def test_a_failed_poll_is_shown_and_the_next_one_may_succeed(looks, watch, error, said):
    watched = watch()
    looks.outcomes[2] = error
    looks.go.release(2)
    assert watched.current(LONG).state is PollState.FRESH
    assert ends_with(watched, PollState.FAILING)
    known = watched.current(0)
    assert known.document == {"number": 1}
    assert str(known.error).startswith(said)
    looks.go.release(3)
    assert ends_with(watched, PollState.FRESH)


def test_the_first_poll_counts_as_starting_until_it_is_stuck(looks, watch, clock):
    watched = watch()
    watched.current(0)
    assert looks.has_begun.acquire(timeout=LONG)
    assert watched.current(0).state is PollState.STARTING
    clock.ahead = poller.STUCK_AFTER + 1
    assert watched.current(0).state is PollState.STUCK
