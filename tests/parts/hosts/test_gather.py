"""No piece is ever lost between hosts: whatever fails in whichever order, somebody is asked for it."""

import threading
import time

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import LONG, until

from syncd.parts.hosts.asking import AskError, HostRequest
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
        patch.setattr("syncd.parts.hosts.gather._PAUSES", {"absent": 0.0, "busy": 0.0})
        yield tmp_path_factory.mktemp("gather")


def gather(place, name, me=HOSTS[0]):
    parts = (Part(1, "xxh3_128", b"", "0" * 32),)
    pieces = tuple(Piece(0, number, 1, parts) for number in range(COUNT))
    plan = PiecePlan((PlannedFile(name, f"/nowhere/{name}", COUNT),), pieces)
    live = LivePieces(str(place), "copy", f"xxh3_128:{name:0>16}", str(place), [name], COUNT)
    made = Gather(plan, Together(HOSTS, me, "", "copy/0"), LocalDisk(), str(place), live, {})
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
    for host, failure, is_late, answers_now in events:
        name = HOSTS[host]
        if made._queues[name]:
            number = made._queues[name].popleft()
            in_flight.append((name, number))
            made._flying[name][number] = HostRequest(name, "")
        if is_late:
            made._take_from(name, 0)
        if answers_now and in_flight:
            made._fail(*in_flight.pop(0), AskError(failure))
    for name, number in in_flight:
        made._fail(name, number, AskError("busy"))
    assert awaited(made) == set(range(COUNT))
    assert sum(map(len, made._queues.values())) == COUNT
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


def test_a_request_whose_answer_never_begins_is_ended(place):
    made, live = gather(place, "overdue")
    made._moved_on = time.monotonic()  # nothing is stuck
    prompt, overdue = HostRequest(HOSTS[1], ""), HostRequest(HOSTS[2], "", connect=0.0, silent=0.0)
    made._flying[HOSTS[1]][1], made._flying[HOSTS[2]][2] = prompt, overdue
    made._judge()
    assert (prompt.is_ended, overdue.is_ended) == (False, True)
    live.close()
    made._work.close()


def test_what_this_host_reads_is_not_asked_of_another_host_again(place):
    made, live = gather(place, "reading")
    with made._changed:
        made._read_rest()
    taken = {made._next_own(is_spare=False) for _ in range(COUNT)}
    assert taken == set(range(COUNT))
    assert not [queue for host, queue in made._queues.items() if host != HOSTS[0] and next_of(made, host)]
    live.close()
    made._work.close()


def next_of(made, host):
    """Return what an asker would ask a host for, without waiting for more."""
    made._over = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made._changed, "wait", lambda seconds: setattr(made, "_over", True))
        return made._next_of(host)


@pytest.mark.parametrize("lost", HOSTS[1:])
def test_a_late_host_s_pieces_are_read_by_one_host_that_all_others_ask(place, lost):
    """Each host takes the same one for late; whoever is next in order moves them to itself, and all others ask it."""
    views = {}
    for me in (host for host in HOSTS if host != lost):
        made, live = gather(place, f"l{next(NAMES)}", me)
        first = made._queues[lost].popleft()
        made._flying[lost][first] = HostRequest(lost, "")  # moves at once, however long its connection takes
        made._take_from(lost, 0)
        views[me] = {number: host for host, queue in made._queues.items() for number in queue}
        live.close()
        made._work.close()
    for number in range(COUNT):
        assert all(number in view for view in views.values())
        (asked,) = {view[number] for view in views.values()}
        assert asked != lost


class HeldDisk(LocalDisk):
    """Gives the bytes of large files once it is told to."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def read_at(self, path, offset, length, *, ahead=True):
        assert length < 9 or self.go.wait(LONG)
        return super().read_at(path, offset, length, ahead=ahead)


def test_the_own_share_is_read_once_no_piece_of_it_is_being_read(place):
    source, target = place / "own", place / "got"
    sizes = {"large": 100, "small": 8}
    for path in (source, target):
        path.mkdir()
    for name, size in sizes.items():
        (source / name).write_bytes(bytes(size))
    digests = (xxhash.xxh3_128_hexdigest(bytes(size)) for size in sizes.values())
    parts = (
        Part(size, "xxh3_128", b"", digest) for size, digest in zip(sizes.values(), digests, strict=True)
    )
    files = tuple(PlannedFile(name, str(source / name), size) for name, size in sizes.items())
    plan = PiecePlan(
        files, tuple(Piece(number, 0, part.length, (part,)) for number, part in enumerate(parts))
    )
    live = LivePieces(str(place), "copy", f"xxh3_128:{'9' * 16}", str(target), list(sizes), 2)
    disk = HeldDisk()
    made = Gather(plan, Together(HOSTS[:1], HOSTS[0], "", "copy/9"), disk, str(target), live, {})
    running = threading.Thread(target=made.run, args=(lambda: False,))
    running.start()
    until(lambda: made._work.has(1))
    assert made.tally.reading == 0
    disk.go.set()
    running.join(LONG)
    assert made.tally.reading > 0
    assert made.tally.read == 108
    live.close()
