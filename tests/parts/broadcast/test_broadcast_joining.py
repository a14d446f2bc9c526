"""Joining a group whose root takes the connection and never answers, as a process does that is stopped."""

import gc
import os
import socket
import threading

import pytest

torch = pytest.importorskip("torch")

from support.waiting import until  # noqa: E402

from syncd.client.wait import Deadline  # noqa: E402
from syncd.errors import TimedOutError  # noqa: E402
from syncd.parts.broadcast.group_calls import GroupError, make_in_time  # noqa: E402
from syncd.parts.broadcast.process_group import ProcessGroup  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402
from syncd.protocol.rendezvous import Offer  # noqa: E402

LONG = 60.0


def joining():
    return [one for one in threading.enumerate() if one.name == "broadcast-join"]


def test_joining_a_silent_trainer_times_out_and_leaves_nothing_open():
    gc.disable()  # what is left must go by itself
    try:
        before = len(os.listdir("/proc/self/fd"))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            offer = Offer("weights", 1, "127.0.0.1", port, "gloo", 2, ("e0",), (), 1, "secret")
            with pytest.raises(TimedOutError, match=r"within 0\.5 s"):
                ProcessGroup.join(offer, "e0", Deadline(SystemClock(), 0.5), torch.device("cpu"))
            assert len(joining()) == 1, "it still waits for an answer"
        until(lambda: not joining())
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def joined(port, goes_on=lambda: True):
    offer = Offer("weights", 1, "127.0.0.1", port, "gloo", 2, ("e0",), (), 1, "secret")
    return ProcessGroup.join(offer, "e0", Deadline(SystemClock(), LONG), torch.device("cpu"), goes_on)


def test_joining_a_trainer_that_is_gone_fails_at_once():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(GroupError, match="refused"):
        joined(port)


def test_joining_stops_if_the_trainer_gave_up_the_round():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(GroupError, match="aborted"):
        joined(silent.getsockname()[1], lambda: False)
    until(lambda: not joining())


class Group:
    """Notes that it is aborted."""

    def __init__(self):
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()


def test_a_group_created_after_the_deadline_is_aborted():
    group, go = Group(), threading.Event()

    def make():
        assert go.wait(LONG)
        return group

    with pytest.raises(TimedOutError):
        make_in_time(make, Deadline(SystemClock(), 0.05))
    assert not group.aborted.is_set()
    go.set()
    assert group.aborted.wait(LONG)


def test_a_group_created_in_time_is_returned_and_errors_are_raised():
    group = Group()
    assert make_in_time(lambda: group, Deadline(SystemClock(), LONG)) is group
    with pytest.raises(ZeroDivisionError):
        make_in_time(lambda: 1 / 0, Deadline(SystemClock(), LONG))
    assert not group.aborted.is_set()
