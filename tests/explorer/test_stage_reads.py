"""Eight engines on a host with one stage: what they read of the job, counted at the system calls of each."""

import contextlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from beds import probe
from programs.light_engine import read_journal

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.synchronizer import Synchronizer

pytestmark = pytest.mark.slow

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENGINES = 8
STEPS = 3
SHAPE = (512, 1024)
_LONG = 120.0

READS = "read,pread64,readv,preadv,preadv2,sendfile,copy_file_range,splice,mmap"
_CALL = re.compile(r"^(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)\) += (\d+|0x[0-9a-f]+)$")
_FILE = re.compile(r"\d+<([^<>]+\.safetensors)>")


@pytest.fixture
def strace():
    if missing := probe._missing("strace"):
        pytest.skip(missing)


def read_of(trace, below):
    """Return the bytes that calls have read of weights below a directory, and how often these were mapped."""
    total, mapped = 0, 0
    with open(trace, encoding="utf-8", errors="replace") as file:
        for line in file:
            call, path = _CALL.match(line.rstrip()), _FILE.search(line)
            if call and path and path[1].startswith(f"{below}/"):
                if call[1] == "mmap":
                    mapped += 1
                else:
                    total += int(call[3])
    return total, mapped


def follow(place, stage, engines, steps):
    """Let engines follow versions; return what each has read of the job, and the bytes of all versions."""
    job = f"{place}/job"
    os.makedirs(job)
    environment = os.environ | {"PYTHONPATH": os.path.dirname(TESTS)}
    with contextlib.ExitStack() as stack:
        run = lambda *argv: stack.enter_context(subprocess.Popen(argv, env=environment))  # noqa: E731
        daemon = run(sys.executable, "-m", "syncd", "watch", job, "--keep-last", "9", "--log-level", "error")
        stack.callback(daemon.kill)
        trainer = stack.enter_context(Synchronizer.open(job, "trainer", poll=0.01))
        started = []
        for number in range(engines):
            trace = ("strace", "-f", "--seccomp-bpf", "-qq", "-y", "-s", "0", "-e", f"trace={READS}")
            program = (f"{TESTS}/programs/explore.py", job, f"e{number}", f"{place}/{number}.journal")
            staged = ("--stage", stage) if stage else ()
            out = ("-o", f"{place}/{number}.trace")
            started.append(run(*trace, *out, sys.executable, *program, "--poll", "0.05", *staged))
            stack.callback(started[-1].kill)
        for step in range(1, steps + 1):
            trainer.set_model_state_dict({"w": np.full(SHAPE, step, np.float32)}, step)
            trainer.wait_for(
                lambda step=step: all(has(place, number, step) for number in range(engines)), _LONG
            )
        trainer.close()
        assert [one.wait(_LONG) for one in started] == [0] * engines
        daemon.terminate()
        assert daemon.wait(_LONG) == 0
    whole = [read_manifest(Job.at(job).disk, Job.at(job).step(step)) for step in range(1, steps + 1)]
    size = sum(shard.size for manifest in whole for shard in manifest.shards)
    return [read_of(f"{place}/{number}.trace", job) for number in range(engines)], size


def has(place, number, step):
    lines = read_journal(f"{place}/{number}.journal")
    return any(line["event"] == "runs" and line["pair"][1] == step for line in lines)


@pytest.mark.slow
def test_eight_engines_with_a_stage_read_the_mount_once(tmp_path, strace, record_line):
    counted, size = follow(tmp_path / "staged", str(tmp_path / "stage"), ENGINES, STEPS)
    total = sum(read for read, _ in counted)
    record_line(
        f"{ENGINES} engines on a host, {STEPS} versions, {size} bytes: with a stage {total / size:.3f} times read "
        f"from the job's mount ({', '.join(str(round(read / size, 2)) for read, _ in counted)} by each)"
    )
    assert [mapped for _, mapped in counted] == [0] * ENGINES
    # Headers are read before the copy, once an engine at most.
    assert size <= total < size + ENGINES * STEPS * 4096


def test_without_a_stage_each_engine_reads_each_version_twice(tmp_path, strace):
    """The count can tell: light engines read each version twice, and here each does that by itself."""
    counted, size = follow(tmp_path / "plain", None, engines=2, steps=1)
    assert all(2 * size <= read < 2 * size + 65536 for read, _ in counted)
