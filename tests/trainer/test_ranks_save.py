"""Real ranks in real processes: they share a step, die in the middle of it, or run out of space."""

import os
import subprocess
import time

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support import forked  # noqa: E402
from support.ports import free_port  # noqa: E402
from support.saving import absent, index_of, load, new_job, temporaries, whole  # noqa: E402

pytestmark = pytest.mark.slow

PROGRAM = f"{os.path.dirname(os.path.abspath(__file__))}/programs/save_steps.py"


@pytest.fixture
def job(tmp_path):
    return new_job(tmp_path / "job")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a rank, which is killed in the end if it has not ended."""
    started = []

    def rank_of(job, rank, world_size, steps, mode, *options):
        argv = (PROGRAM, job.root, rank, world_size, *steps, mode, *options)
        started.append(forked.start(f"{tmp_path}/{len(started)}.log", {}, *argv))
        return started[-1]

    yield rank_of
    for process in started:
        process.end()


def ended(processes):
    """Wait for processes and return their exit statuses and what they said."""
    statuses = [process.wait(120) for process in processes]
    return statuses, [process.said() for process in processes]


def equals(job, step):
    found = load(job, step)
    assert len(found) >= 7
    for number in range(7):
        value = torch.tensor(float(step * 10 + number)).to(torch.bfloat16)
        assert found[f"layers.{number}.weight"].unique() == value


@pytest.mark.parametrize("mode", ["background", "stream"])
def test_two_ranks_over_gloo_write_one_step(job, start, mode):
    options = ((1, 3), mode, "--gloo", free_port())
    statuses, said = ended([start(job, rank, 2, *options) for rank in range(2)])
    assert statuses == [0, 0], said
    manifest = whole(job, 3)
    assert [record.name for record in manifest.shards] == [
        "actor/model-00001-of-00002.safetensors",
        "actor/model-00002-of-00002.safetensors",
    ]
    assert all(record.tensors for record in manifest.shards)
    assert {record.name for record in manifest.files} == {
        "actor/config.json",
        "actor/model.safetensors.index.json",
    }
    for step in (1, 2, 3):
        equals(job, step)
    assert set(index_of(job, 3)["weight_map"]) == set(load(job, 3))


def test_a_rank_killed_while_writing_leaves_no_step_and_a_retry_succeeds(job, start, tmp_path):
    ready = tmp_path / "ready"
    other = start(job, 1, 2, (5, 5), "background", "--large", 40)
    victim = start(job, 0, 2, (5, 5), "background", "--large", 40, "--slow", 30, "--ready", ready)
    _until(lambda: ready.exists() and temporaries(job, 5))
    victim.end()
    assert absent(job, 5)
    other.end()
    ranks = [start(job, rank, 2, (5, 5), "background", "--large", 40, "--attempt", "b") for rank in range(2)]
    statuses, said = ended(ranks)
    assert statuses == [0, 0], said
    assert whole(job, 5).attempt == "b-5"
    equals(job, 5)


@pytest.mark.parametrize("mode", ["background", "stream"])
@pytest.mark.group("mounts")
def test_a_full_file_system_fails_the_save_on_all_ranks(tmp_path, start, mode):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        job = new_job(place / "job")
        # The large tensor is rank 1's or rank 0's, whichever has less; its rank meets the end of the disk.
        statuses, said = ended([start(job, rank, 2, (1, 1), mode, "--large", 64) for rank in range(2)])
        assert statuses == [74, 74]
        assert sum("No space left" in text for text in said) == 2, said
        assert sum("could not write its part" in text for text in said) == 1
        assert absent(job, 1)
        assert not temporaries(job, 1)
    finally:
        subprocess.run(["umount", place], check=True)


def _until(holds):
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)
