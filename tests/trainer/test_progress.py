"""What a person sees: on a real pseudo-terminal, in a pipe, in a pipe that nobody reads."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from trainer.reporting.display import PlainDisplay, Progress
from trainer.reporting.figures import RunFigures, groups, head, short, span

PROGRAM = str(Path(__file__).parent / "programs" / "show_progress.py")
COLUMNS, ROWS = 80, 200
CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


def screen(data):
    """Return the lines that a terminal shows after these bytes: what rich needs of one, and nothing else."""
    lines, row, at, column = [""], 0, 0, 0
    while at < len(data):
        control = CONTROL.match(data, at)
        if control:
            at = control.end()
            number, letter = control.groups()
            if letter == "A":
                row -= int(number or 1)
            elif letter == "K":
                lines[row] = ""
            else:
                assert letter in "mhl", control.group()
            continue
        character, at = data[at], at + 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
            assert column <= COLUMNS
    return [line.rstrip() for line in lines]


def on_terminal(*arguments):
    """Run the program with stderr on a pseudo-terminal of 80 columns; return what it wrote there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"} | {"NO_COLOR": "", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *arguments], stderr=follower, stdout=subprocess.PIPE, env=environment
    )
    os.close(follower)
    found = b""
    try:
        while piece := os.read(leader, 65536):
            found += piece
    except OSError:  # the other end was closed: the program has ended
        pass
    finally:
        os.close(leader)
    out, _ = process.communicate(timeout=60)
    return process.returncode, found.decode(), out.decode()


def test_on_a_terminal_log_lines_scroll_above_the_progress_display():
    code, written, out = on_terminal("auto", "30")
    assert (code, out) == (0, "")
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor comes back
    lines = [line for line in screen(written) if line]
    bar, learnt, speed, traffic, trouble = lines[-6:-1]
    assert bar.startswith("step 130/1000  ETA ")
    assert learnt == "reward 0.525±0.21  loss -0.0123  kl 0.00042  entropy 1.23  grad 0.91  length 812"
    assert speed == "tokens/s 29.3k  step 4.2s  train 3.1s  wait 0.93s  sync 0.12s  save 12.3s"
    assert traffic == "version 130  saved 100  waiting 512  age 1.2 (max 4)"
    assert trouble == "failed syncs 1  dropped 16"
    rest = [re.sub(r"^\S+Z ", "", line) for line in [*lines[:-6], lines[-1]]]
    said = (
        "[info     ] a log line           step={0}|WARNING:library:a library's line {0}|something printed {0}"
    )
    wanted = [line for step in (110, 120, 130) for line in said.format(step).split("|")]
    assert rest == [*wanted, "resting", "[info     ] after the display"]


def test_in_a_pipe_progress_goes_to_stdout_and_the_log_to_stderr():
    done = subprocess.run(
        [sys.executable, PROGRAM, "auto", "4"], check=True, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step=101/1000 ")
    assert "reward=0.522±0.21 loss=-0.0123 kl=0.00042" in lines[0]
    assert "failed_syncs=1" in lines[0]
    assert lines[-1] == "resting"
    assert "\x1b" not in done.stdout
    assert all(line.startswith("{") for line in done.stderr.splitlines())


def test_a_closed_stdout_pipe_does_not_end_the_run():
    with subprocess.Popen(
        [sys.executable, PROGRAM, "plain", "20"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(60) == 0, said
    assert "after the display" in said


# --- without a screen -------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def shown():
    """Return a progress of plain lines at a clock that is set by hand, and the lines it has written."""
    clock, stream = Clock(), io.StringIO()
    figures = RunFigures(50, 10, clock.now)
    progress = Progress(figures, PlainDisplay(figures, stream, every=5.0), clock)

    def at(seconds, step, **metrics):
        clock.now = 100.0 + seconds
        progress.update({name.replace("__", "/"): value for name, value in metrics.items()}, step)
        return stream.getvalue().splitlines()

    return progress, stream, at


def steps_of(lines):
    return [int(re.match(r"step=(\d+)", line).group(1)) for line in lines]


def test_plain_progress_lines_are_limited_to_one_every_few_seconds(shown):
    _, _, at = shown
    for second in range(1, 14):
        lines = at(second, 10 + second, reward__mean=0.5)
    assert steps_of(lines) == [11, 16, 21]


def test_a_sync_and_a_save_each_print_a_line(shown):
    _, _, at = shown
    at(1, 11, sync__step=10.0, save__step=0.0)
    assert steps_of(at(2, 12, sync__step=12.0)) == [11, 12]
    assert steps_of(at(3, 13, sync__step=12.0)) == [11, 12]
    assert steps_of(at(4, 14, save__step=14.0)) == [11, 12, 14]


def test_closing_prints_the_last_step_if_it_was_not_printed(shown):
    progress, stream, at = shown
    at(1, 11, reward__mean=0.1)
    at(2, 12, reward__mean=0.2)
    progress.close()
    progress.close()
    progress.update({}, 13)
    assert steps_of(stream.getvalue().splitlines()) == [11, 12]


def test_writing_to_a_closed_stream_raises_nothing(shown):
    progress, stream, _ = shown
    stream.close()
    progress.update({"critic/score/mean": 1.0}, 11)
    progress.note("nobody reads this")
    progress.close()


def test_unknown_metrics_are_not_shown():
    figures = RunFigures(None, 0, 0.0)
    figures.update({"sft/loss": 1.5}, 1, 2.0)
    assert head(figures) == [("step", "1")]
    assert groups(figures) == [[("loss", "1.5")]]


def test_a_missing_metric_keeps_its_last_value():
    figures = RunFigures(10, 0, 0.0)
    figures.update({"critic/score/mean": 0.5, "perf/tokens_per_second": 150.0}, 2, 4.0)
    figures.update({"experience/waiting": 3.0}, 2, 9.0)
    assert (figures.step, figures.pace, figures.left()) == (2, 2.0, 16.0)
    assert groups(figures) == [[("reward", "0.500")], [("tokens/s", "150")], [("waiting", "3")]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.118, "0.12s"),
        (4.21, "4.2s"),
        (187, "3:07"),
        (3723.4, "1:02:03"),
        (273_900, "3d 04:05"),
        (59.96, "1:00"),
    ],
)
def test_durations_are_shortened(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (12_345, "12.3k"), (4.56e6, "4.56M"), (7e9, "7G")])
def test_counts_are_shortened(value, text):
    assert short(value) == text
