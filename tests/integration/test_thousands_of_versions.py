"""Two thousand versions, one after the other: what a daemon and an explorer need stays what it was."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from soak.flat import is_flat, trend
from soak.samples import Samples
from support import checker
from support.jobs import write_step
from support.processes import PROGRAMS
from support.sweep import ENVIRONMENT

from syncd.protocol.layout import Job

VERSIONS, EVERY = 2000, 20
EVENTS_BYTES = 64 << 10
ALLOWED = {"rss": 1 << 20, "fds": 0.5, "threads": 0.5, "state_files": 0.5, "version_bytes": 8.0}
"""Growth from the thousandth to the last version."""

CONFIG = f"[daemon]\nkeep_last = 1\ntrash_grace = 0.2\nevents_bytes = {EVENTS_BYTES}\n"
LINE = 64 << 10
_LONG = 60.0


@contextlib.contextmanager
def in_memory():
    """Make a directory in memory if there is such a place: nothing here is about durability."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        yield place


@contextlib.contextmanager
def running(log, *argv):
    with (
        open(log, "wb") as output,
        subprocess.Popen([sys.executable, *argv], stdout=output, stderr=output, env=ENVIRONMENT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def publish(job, step):
    write_step(job, step)
    ends = time.monotonic() + _LONG
    while checker.pair(job.root) != (1, step):
        assert time.monotonic() < ends, f"step {step} is not published"
        time.sleep(0.003)


@pytest.mark.slow
def test_resources_do_not_grow_over_two_thousand_versions(tmp_path, record_line):
    with in_memory() as place, contextlib.ExitStack() as stack:
        job = Job.at(f"{place}/job")
        os.mkdir(job.root)
        (tmp_path / "daemon.toml").write_text(CONFIG)
        textfile = str(tmp_path / "job.prom")
        daemon = (job.root, "--config", f"{tmp_path}/daemon.toml", "--metrics-textfile", textfile)
        explorer = (f"{PROGRAMS}/soak_explorer.py", job.root, "e0", f"{tmp_path}/e0.jsonl", "--hold", "0")
        parts = {
            "daemon": stack.enter_context(running(tmp_path / "daemon.log", "-m", "syncd", "watch", *daemon)),
            "e0": stack.enter_context(running(tmp_path / "e0.log", *explorer)),
        }
        samples = Samples()
        for step in range(1, VERSIONS + 1):
            publish(job, step)
            if step % EVERY == 0:
                samples.take(float(step), job.root, {name: part.pid for name, part in parts.items()})
        check(samples, record_line)
        assert os.stat(textfile).st_size < 16 << 10
        for part in parts.values():
            part.send_signal(signal.SIGTERM)
        assert [part.wait(_LONG) for part in parts.values()] == [0, 0]
        assert checker.problems(job.root, checker.Past((1, VERSIONS))) == []


def check(samples, record_line):
    """Compare the second thousand with the first, and what is bounded with its bounds."""
    shown = []
    for (name, what), points in samples.series.items():
        if what in ALLOWED:
            found = trend(points)
            assert is_flat(found, ALLOWED[what]), (name, what, found)
            shown.append(f"{name} {what} {found.middle:.0f} {found.growth:+.0f}")
    highest = samples.highest
    assert EVENTS_BYTES < highest["job", "events_bytes"] < 4 * (EVENTS_BYTES + LINE), "rotated, and bounded"
    assert highest["job", "events_longest"] < EVENTS_BYTES + LINE
    # What waits in the trash is what was removed within the grace and one emptying; in the job, what retention keeps.
    assert highest["job", "trash_steps"] < VERSIONS / 4
    assert highest["job", "steps"] < 20
    record_line(f"{VERSIONS} versions, median and growth over the second half: {', '.join(shown)}")
