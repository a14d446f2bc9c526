"""Ranks that are killed, told to stop, flood or fail: what becomes of the others, and which code comes out."""

import os
import pty
import signal
import time
from functools import partial

import pytest
from support.launching import INT, KILL, TERM, USR2, Launch, alive, until

from trainer.stopping import StopSignals

pytestmark = pytest.mark.slow


def gone(pids):
    until(lambda: not any(alive(pid) for pid in pids))


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    launch = Launch(tmp_path, "--nproc", "2", "--rank", "wait_for_stop")
    ranks = launch.up(2)
    os.kill(ranks[1]["pid"], KILL)
    code, _, errors = launch.ended()
    assert code == 128 + 9
    assert f"rank 1 (pid {ranks[1]['pid']}) was killed by SIGKILL" in errors
    gone([rank["pid"] for rank in ranks])


def test_a_failed_rank_ends_the_others_with_its_exit_code(tmp_path):
    code, output, errors = Launch(tmp_path, "--nproc", "2", "--rank", "fail").ended()
    assert code == 1
    assert "[rank 1] error: the disk is on fire\n[rank 1] hint: call somebody\n" in errors
    assert "rank 1 (pid" in errors
    assert "rank 0 was asked by SIGTERM" in output or "rank 0" not in output


def unread_pipe():
    source, entry = os.pipe()
    os.close(source)
    return open(entry, "wb")


@pytest.mark.parametrize("make", [partial(open, "/dev/full", "wb"), unread_pipe], ids=["full", "unread"])
def test_ranks_may_save_when_one_fails_although_nothing_can_be_printed(tmp_path, make):
    with make() as errors:
        launch = Launch(tmp_path, "--nproc", "2", "--rank", "wait_for_stop", stderr=errors)
    ranks = launch.up(2)
    os.kill(ranks[1]["pid"], KILL)
    code, output, _ = launch.ended()
    assert (code, output) == (128 + 9, "rank 0 was asked by SIGTERM\n")


@pytest.mark.parametrize("number", [TERM, USR2, INT], ids=lambda number: number.name)
def test_a_stop_signal_reaches_every_rank(tmp_path, number):
    launch = Launch(tmp_path, "--nproc", "2", "--rank", "wait_for_stop")
    launch.up(2)
    launch.send(number)
    code, output, errors = launch.ended()
    assert (code, output) == (75, f"rank 0 was asked by {number.name}\n")
    assert errors == f"[rank 1] rank 1 was asked by {number.name}\n"


@pytest.mark.parametrize(("number", "expected"), [(TERM, 75), (INT, 130)], ids=["TERM", "INT"])
def test_a_stop_signal_before_training_ends_the_ranks_at_once(tmp_path, number, expected):
    launch = Launch(tmp_path, "--nproc", "2", "--rank", "begin")
    ranks = launch.up(2)
    launch.send(number)
    assert launch.ended() == (expected, "", "")
    gone([rank["pid"] for rank in ranks])


def test_a_third_interrupt_kills_hanging_ranks(tmp_path):
    launch = Launch(tmp_path, "--nproc", "2", "--rank", "hang")
    ranks = launch.up(2)
    sent = 0
    # One more at the starter's own end would end it by that signal.
    while any(alive(rank["pid"]) for rank in ranks):
        launch.send(INT)
        sent += 1
        time.sleep(0.3)
    assert launch.ended()[0] == 128 + 9
    assert sent >= 3


def test_no_rank_outlives_the_supervisor(tmp_path):
    launch = Launch(tmp_path, "--nproc", "2", "--rank", "hang")
    ranks = launch.up(2)
    launch.process.kill()
    gone([rank["pid"] for rank in ranks])
    launch.ended()


def test_ctrl_c_on_a_terminal_arrives_once(tmp_path):
    leader, follower = pty.openpty()
    launch = Launch(
        tmp_path, "--nproc", "2", "--rank", "wait_for_stop",
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )  # fmt: skip
    os.close(follower)
    launch.up(2)
    os.write(leader, b"\x03")
    assert launch.process.wait(60) == 75
    shown = os.read(leader, 65536).decode()
    assert "rank 0 was asked by SIGINT" in shown
    assert "KeyboardInterrupt" not in shown
    os.close(leader)


def test_large_output_of_another_rank_is_relayed_completely(tmp_path):
    code, output, errors = Launch(tmp_path, "--nproc", "2", "--rank", "flood").ended()
    assert (code, output) == (0, "rank 0 has the terminal\n")
    lines = errors.splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert [line.split()[3] for line in lines if " line " in line] == [str(number) for number in range(20000)]
    assert sum(line.count("y") for line in lines) == 200_000


class TestStopSignals:
    def test_stop_signals_are_recorded_and_handlers_are_restored(self):
        before = [signal.getsignal(number) for number in (TERM, INT, USR2)]
        for number in (TERM, USR2, INT):
            with StopSignals() as stop:
                assert stop.requested is None
                os.kill(os.getpid(), number)
                assert stop.requested == number
        assert [signal.getsignal(number) for number in (TERM, INT, USR2)] == before

    def test_a_second_interrupt_raises_keyboard_interrupt(self):
        with StopSignals() as stop:
            os.kill(os.getpid(), TERM)
            os.kill(os.getpid(), INT)
            assert stop.requested == INT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), INT)
