"""No piece is ever lost between hosts: whatever fails in whichever order, somebody is asked for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.parts.hosts.asking import AskError
from syncd.parts.hosts.gather import Gather, Together
from syncd.parts.hosts.pieces import Part, Piece, PiecePlan, PlannedFile
from syncd.parts.hosts.shelf import LivePieces
from syncd.protocol.local_disk import LocalDisk

COUNT = 12
HOSTS = ("h0:1", "h1:1", "h2:1", "h3:1")
NAMES = iter(range(10**9))
FAILURES = ("refused", "wrong", "denied", "late", "absent", "busy", "lost")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncd.parts.hosts.gather._PAUSE", 0.0)
        yield tmp_path_factory.mktemp("gather")


def gather(place, name):
    parts = (Part(1, "xxh3_128", b"", "0" * 32),)
    pieces = tuple(Piece(0, number, 1, parts) for number in range(COUNT))
    plan = PiecePlan((PlannedFile(name, f"/nowhere/{name}", COUNT),), pieces)
    live = LivePieces(str(place), "copy", f"xxh3_128:{name:0>16}", str(place), [name], COUNT)
    made = Gather(plan, Together(HOSTS, HOSTS[0], "", "copy/0"), LocalDisk(), str(place), live)
    made._begun = made._moved_on = 0.0
    for number in range(COUNT):
        made._enqueue(number)
    return made, live


def awaited(made):
    """Return the pieces that somebody is asked for: in the queue of this host, or of one that is still asked."""
    asked = [host for host in made._queues if host not in made.tally.removed]
    return {number for host in asked for number in made._queues[host]}


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(FAILURES), st.booleans(), st.booleans()), max_size=40
    )
)
def test_whatever_fails_every_piece_is_asked_of_somebody(place, events):
    made, live = gather(place, f"f{next(NAMES)}")
    in_flight = []  # popped by an asker whose answer has yet to come: of a host, several at once
    for host, failure, is_ended, answers_now in events:
        name = HOSTS[host]
        if made._queues[name]:
            in_flight.append((name, made._queues[name].popleft()))
        if answers_now and in_flight:
            made._fail(*in_flight.pop(0), AskError(failure), is_ended=is_ended)
    for name, number in in_flight:
        made._fail(name, number, AskError("busy"), is_ended=False)
    assert awaited(made) == set(range(COUNT))
    live.close()
    made._work.close()


def test_what_is_missing_is_read_once_nothing_comes_from_anywhere(place):
    made, live = gather(place, "stuck")
    for queue in made._queues.values():
        queue.clear()
    made._judge()
    assert set(made._queues[HOSTS[0]]) == set(range(COUNT))
    live.close()
    made._work.close()


def test_what_this_host_reads_for_others_is_not_asked_of_another_host_again(place):
    made, live = gather(place, "reading")
    (number, *_) = made._queues[HOSTS[1]]
    assert not made.await_piece(number, 0.0, read=True)
    assert made._next_own(is_spare=False) == number
    assert number not in iter(lambda: made._next_of(HOSTS[1]) if made._queues[HOSTS[1]] else None, None)
    live.close()
    made._work.close()
