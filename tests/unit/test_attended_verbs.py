"""How a verb that works in a child process is watched: what is shown, how long is waited, and what is said."""

import pytest
from jobs import ManualClock

from syncd.protocol.local_disk import LocalDisk
from syncd.stall.calls import SLOWEST, AttendedDisk, Call, InHand
from syncd.stall.child import Board
from syncd.stall.verbs import Attended, Noted, Seen, Waited
from syncd.worker_thread import Work


def test_a_board_shows_what_was_written_last():
    board = Board()
    assert board.read() == (None, False)
    call = Call("write", "/a/ü\udcff", 12.5, 3.0)
    board.write(call, True)
    assert board.read() == (call, True)
    board.write(Call("stat", "/b", 13.0), False)
    assert board.read() == (Call("stat", "/b", 13.0), False)
    board.write(None, True)
    assert board.read()[0] is None


def test_a_path_of_any_length_fits_a_board():
    board = Board()
    board.write(Call("stat", "/" + "x" * 20000, 1.0), False)
    shown, _ = board.read()
    assert shown.path == ("/" + "x" * 20000)[: len(shown.path)]
    assert len(shown.path) > 4096


def test_a_call_that_is_being_written_is_not_read():
    board = Board()
    board.write(Call("stat", "/b", 13.0), False)
    board._memory[0] = 1
    assert board.read() == (None, True)


def test_what_is_noted_is_shown_with_the_oldest_call_and_whether_anything_may_have_changed():
    board = Board()
    noted = Noted(board)
    with noted("stat", "/outer"):
        assert board.read()[0].path == "/outer"
        with noted("mkdir", "/inner"):
            assert board.read()[0].path == "/inner"
        shown, changing = board.read()
        assert (shown.path, changing) == ("/outer", True)
    assert board.read()[0] is None


def test_waiting_counts_looks_so_that_a_host_that_slept_has_not_waited():
    call, waited = Call("stat", "/a", 0.0), Waited()
    assert waited.look(call, 0.1, 0.5) == 0.0
    assert waited.look(call, 0.4, 0.5) == pytest.approx(0.3)
    assert waited.look(call, 3600.0, 0.5) == pytest.approx(0.8)
    assert waited.look(Call("stat", "/a", 5.0), 3600.1, 0.5) == 0.0
    assert waited.look(None, 3600.2, 0.5) == 0.0


def test_a_large_file_is_noted_piece_by_piece_and_its_sync_is_given_time(tmp_path):
    clock = ManualClock()
    in_hand, ages, last = InHand(clock), [], []

    class Slow(LocalDisk):
        def replace(self, path, data, **more):
            for _ in data:
                ages.append(in_hand.age(in_hand.oldest()))
                clock.at += 100
            last.append(in_hand.oldest())

    pieces = (b"x" * SLOWEST for _ in range(3))
    AttendedDisk(Slow(), in_hand).replace(f"{tmp_path}/a", pieces)
    assert ages == [0.0, 0.0, 0.0], "no piece waits for those before"
    assert (last[0].what, last[0].allowance) == ("write", 3.0)
    assert in_hand.oldest() is None


@pytest.mark.parametrize(
    ("acts", "changing", "said"),
    [
        (None, True, "(list)"),
        ("step {step} is pinned", False, "(list); nothing was changed"),
        ("step {step} is pinned", True, "(list); it is not known whether step 7 is pinned"),
    ],
)
def test_what_is_said_of_a_verb_that_was_left(acts, changing, said):
    error = Attended("pin", acts=acts)._stuck(
        {"step": 7, "job": "/j"}, Seen(Call("list", "/j/x", 0.0), 10.0, 11.0, changing)
    )
    assert error.message.startswith("the mount has not answered for 10 s, since ")
    assert error.message.endswith(said)
    assert (error.path, error.exit_code) == ("/j/x", 74)
    assert ("syncd status /j" in error.hint) == ("not known" in said)


def test_work_is_done_aside_and_its_error_is_raised_by_whoever_asks():
    ended = []
    work = Work(lambda: 5, ended=lambda: ended.append(True))
    work.start()
    assert work.wait(20)
    assert (work.goes_on, work.result()) == (False, 5)
    failing = Work(lambda: {}["none"])
    failing.start()
    assert failing.wait(20)
    with pytest.raises(KeyError):
        failing.result()
