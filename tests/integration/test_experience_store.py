"""Real writer processes, killed and started again, and a reader that saves its state and is started again."""

import json
import random
import subprocess
import sys
import time
from collections import Counter

from support import forked
from support.experiences import fifo
from support.paths import PYTHONPATH, TESTS

from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from trainer.experience.store import ExperienceReader

DEADLINE = 100.0


def start(job, explorer, count, *options):
    argv = (f"{TESTS}/programs/write_experiences.py", job.root, explorer, count, *options)
    return forked.start(f"{job.root}.{explorer}.log", {"PYTHONPATH": PYTHONPATH}, *argv)


def strategy_of(job, state=None):
    reader = ExperienceReader(job, SystemClock(), consumed="archive")
    strategy = fifo(job, None, reader=reader, groups=3, max_waiting=12)
    if state is not None:
        strategy.load_state_dict(json.loads(state))
    return strategy


def test_each_experience_is_drawn_once_while_writers_and_reader_are_killed(tmp_path, record_line):
    job, chance, count = Job.at(tmp_path), random.Random(5), 40
    names = ["e0", "e1", "e2"]
    writers = {name: start(job, name, count) for name in names}
    kills = dict.fromkeys(names, 3)
    strategy, state, saved, drawn = strategy_of(job), None, [], []
    end = time.monotonic() + DEADLINE
    while len(drawn) < 2 * count * len(names) and time.monotonic() < end:
        for name, writer in writers.items():
            if kills[name] and chance.random() < 0.05:
                writer.kill()
                kills[name] -= 1
            if writer.poll() not in (None, 0):
                writers[name] = start(job, name, count)
        batch = strategy.sample(1, generation=1)
        drawn += [experience.task for experience in batch.experiences] if batch else []
        if chance.random() < 0.2:
            state, saved = json.dumps(strategy.state_dict()), list(drawn)
            strategy.commit(json.loads(state))
        if chance.random() < 0.1:
            strategy, drawn = strategy_of(job, state), list(saved)
        time.sleep(0.01)
    for writer in writers.values():
        assert writer.wait(DEADLINE) == 0
    assert Counter(drawn) == {f"task-{name}-{seq}": 2 for name in names for seq in range(1, count + 1)}
    assert strategy.reader.counts["rejected"] == 0
    record_line(
        f"experiences: {len(drawn)} drawn once each from {len(names)} writers killed {9 - sum(kills.values())} times"
    )


def kill_at_work(job, explorer, chance):
    """Start a writer of large batches, kill it after its first one, and return what it was writing then."""
    before = batch_paths.numbers(job, batch_paths.batches(job, explorer))
    writer, end = start(job, explorer, 10**6, "20000"), time.monotonic() + DEADLINE
    while batch_paths.numbers(job, batch_paths.batches(job, explorer)) <= before and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(chance.random() * 0.05)
    writer.end()
    above = batch_paths.writers(job, explorer)
    return [entry.name for run in job.disk.list(above) for entry in job.disk.list(f"{above}/{run.name}")]


def test_a_killed_writer_leaves_no_readable_partial_batch(tmp_path, record_line):
    job, chance = Job.at(tmp_path), random.Random(6)
    torn = [kill_at_work(job, "e0", chance) for _ in range(6)]
    record_line(f"experiences: {sum(map(bool, torn))} of {len(torn)} kills came in the middle of a batch")
    seqs = sorted(batch_paths.numbers(job, batch_paths.batches(job, "e0")))
    assert seqs
    assert seqs == list(range(1, len(seqs) + 1))
    assert {entry.name for entry in job.disk.list(batch_paths.batches(job, "e0"))} == {
        f"{seq}.parquet" for seq in seqs
    }
    for seq in seqs:
        path = batch_paths.batch(job, "e0", seq)
        assert decode_batch(job.disk.read(path, 1 << 28), path)[0].task == f"task-e0-{seq}"
    strays = start(job, "e0", len(seqs) + 1)
    assert strays.wait(DEADLINE) == 0
    assert [entry.name for entry in job.disk.list(batch_paths.writers(job, "e0"))] == []


def test_the_experience_writer_imports_neither_torch_nor_the_trainer():
    code = "import sys, syncd.experience.writer; print([m for m in ('torch', 'trainer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
