"""The whole loop in real processes: trainer, daemon, a fast and a slow explorer, in each style of syncing."""

import contextlib
import itertools
import json
import os
import time
from collections import defaultdict

import pytest
from support import checker, matrices
from support.job_file import tiny_job, write_job
from support.paths import TESTS
from support.whole_jobs import RANK, ended, free_port, journal_lines, logs, program

from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.layout import Job

pytestmark = [pytest.mark.group("forked"), pytest.mark.slow]

STEPS, INTERVAL = 8, 2
PAUSES = {"fast": 0.01, "slow": 0.15}
LIMIT = 150.0
STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")


def run(place, style, method, memory):
    """Run all of it until trainer and explorers have ended by themselves; return their exit codes."""
    job = f"{place}/job"
    os.mkdir(job)
    sync = {"method": method, "memory_dir": str(memory), "style": style, "interval": INTERVAL}
    trainer = {"nproc": 1, "total_steps": STEPS, "start_daemon": False}
    data = {"consumed": "archive", "wait_timeout": 60.0}
    write_job(f"{place}/job.toml", tiny_job(job, data=data, sync=sync, trainer=trainer))
    shared = ("--style", style, "--interval", str(INTERVAL), "--steps", str(STEPS), "--limit", str(LIMIT))
    deadline = time.monotonic() + LIMIT
    with contextlib.ExitStack() as running:
        start = lambda *argv, **more: running.enter_context(program(place, *argv, **more))  # noqa: E731
        daemon = start("daemon", "-m", "syncd", "watch", job, "--keep-last", "99")
        train = ("-m", "trainer", "train", f"{place}/job.toml")
        started = {"trainer": start("trainer", *train, **RANK, MASTER_PORT=str(free_port()))}
        for name, pause in PAUSES.items():
            explore = (f"{TESTS}/programs/explore.py", job, name, f"{place}/{name}.journal")
            started[name] = start(name, *explore, *shared, "--pause", str(pause))
        codes = {name: ended(one, deadline) for name, one in started.items()}
        daemon.terminate()
        return codes | {"daemon": ended(daemon, time.monotonic() + 30)}


def journal(place, name):
    """Return the pairs that an engine has run, in their order."""
    return [tuple(line["pair"]) for line in journal_lines(place, name) if line["event"] == "runs"]


def events(job, name):
    with open(f"{job}/.syncd/events.jsonl", encoding="utf-8") as file:
        return [event for event in map(json.loads, file) if event["event"] == name]


def experiences(job):
    """Return all experiences by explorer, in the order of their batches."""
    found = defaultdict(list)
    for name in PAUSES:
        batches = {}
        for directory in (batch_paths.batches(Job.at(job), name), batch_paths.archive(Job.at(job), name)):
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(directory):
                    with open(entry.path, "rb") as file:
                        batches[int(entry.name.split(".")[0])] = decode_batch(file.read(), entry.path)
        found[name] = [batches[number] for number in sorted(batches)]
    return found


def weights_of(job, step):
    """Return the digests of what a step holds."""
    return [record["digest"] for record in checker.manifest(job, step)["shards"]] if step else ["start"]


@pytest.mark.fault("the version is set before the weights are loaded")
@pytest.mark.parametrize(
    ("method", "style"),
    matrices.rows(
        itertools.product(["checkpoint", "memory"], STYLES),
        *(("checkpoint", style) for style in STYLES),
        ("memory", "fully_async"),
    ),
)
def test_all_processes_exit_with_0_at_the_last_step_in_each_style_and_method(tmp_path, shm, method, style):
    """1 trainer, a fast and a slow explorer, interval 2, 8 steps."""
    job = f"{tmp_path}/job"
    codes = run(tmp_path, style, method, shm)
    assert codes == {"daemon": 0, "trainer": 0, "fast": 0, "slow": 0}, logs(tmp_path)
    published = [(event["generation"], event["step"]) for event in events(job, "version_published")]
    assert published[-1] == checker.pair(job) == (1, STEPS)
    found = experiences(job)
    for name in PAUSES:
        ran = journal(tmp_path, name)
        assert all(one < other for one, other in itertools.pairwise(ran))
        assert ran[-1] == published[-1]
        assert set(ran) <= set(published)
        check_experiences(job, found[name], ran)
        check_places(tmp_path, name, shm if method == "memory" else job)
    assert os.listdir(shm) == [], "nothing is left in memory"
    if style in ("fixed", "trainer_driven"):
        # Nobody is ahead of a sync: each pair of an explorer's steps is made by the version of the pair before.
        assert published == [(1, step) for step in range(INTERVAL, STEPS + 1, INTERVAL)]
        for name in PAUSES:
            assert [batch[0].step for batch in found[name]] == [0, 0, 2, 2, 4, 4, 6, 6]


def check_places(place, name, expected):
    """Check where an engine has loaded from; what has gone from memory when it comes late is loaded from files."""
    paths = [line["path"] for line in journal_lines(place, name) if line["event"] == "runs"]
    assert any(path.startswith(f"{expected}/") for path in paths), paths


def check_experiences(job, batches, ran):
    """Check that each experience names the version whose bytes the engine held when it was made."""
    assert len(batches) == STEPS
    for experience in itertools.chain(*batches):
        assert (experience.generation, experience.step) in {(1, 0), *ran}
        assert list(experience.info["weights"]) == weights_of(job, experience.step)
