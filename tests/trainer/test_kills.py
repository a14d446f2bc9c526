"""kill -9 of one rank or of all at random moments, then a start again: as if nothing had happened.

SYNCD_KILLS says how many kills there are; SYNCD_ENGINE=verl has verl's engine killed, which takes minutes,
SYNCD_ENGINE=ppo the same with a critic, and SYNCD_ENGINE=lora with adapters as steps. `make test` kills where it
harms most, while a training state is written; `make test-matrices` at any moment too, and one run with a critic once.

Torch and verl take longer to import than a run from kill to kill. So ranks to be killed are forked from a process
that has imported them, and meet as torchrun's do. The last start of the killed run and the first of the
stopped one are the command itself.
"""

import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass

import pytest
import xxhash
from support import forked
from support.checker import marker, sealed
from support.job_file import job_of, write_job
from support.matrices import LONG, rows
from support.ports import free_port
from support.trainers import ENVIRONMENT, write_experiences

from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest

pytestmark = [pytest.mark.group("kills"), pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("SYNCD_KILLS", "2"))
SIGNALS = [signal.SIGTERM, signal.SIGUSR2] if KILLS > 3 else [signal.SIGUSR2]
"""Each, or the one that is Slurm's: test_launch_signals.py has all of them on ranks that train nothing."""

SEED = int(os.environ.get("SYNCD_SEED", "1"))
ENGINE = os.environ.get("SYNCD_ENGINE", "tiny")
_GRPO = {"name": "grpo", "optimizer": {"lr": 0.01}}
TABLES = {
    "tiny": {
        "engine": {"name": "tests.tiny", "options": {"pause": 0.08, "width": 1000}},
        "algorithm": _GRPO,
    },
    "verl": {"engine": {"compute_dtype": "float32"}, "algorithm": _GRPO},
    "lora": {"model": {"lora": {"rank": 4}}, "engine": {"compute_dtype": "float32"}, "algorithm": _GRPO},
    "ppo": {
        "engine": {"compute_dtype": "float32"},
        "critic": {"enabled": True, "warmup_steps": 1, "mini_batches": 2, "optimizer": {"lr": 0.01}},
        "algorithm": {**_GRPO, "name": "ppo"},
    },
}
"""What is trained.

The width of the tiny engine makes a training state of 12 MB a rank, which takes long enough to be killed meanwhile.
"""

STEPS = 24
_LONG = 600.0
_GRACE = 30.0
_FORKED_FROM = "torch" if ENGINE == "tiny" else "verl"


@dataclass(frozen=True)
class Kind:
    """What is trained, for how many steps, on how many ranks, with a full checkpoint or a sync each so many steps."""

    engine: str
    steps: int
    ranks: int
    interval: int
    sync: int = 1


WHOLE = Kind(ENGINE, STEPS, 2, 3)
ONLY_FULL = Kind(ENGINE, STEPS, 2, 3, 3)
"""The same end with fewer steps to vacate after each kill, which takes the daemon seconds."""

SHORT = Kind("ppo", 4, 1, 1)
"""One kill of an actor with its critic, each full checkpoint of which is one rename."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory for jobs."""
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Have forked ranks use as many threads as started ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def straight(place):
    """What an undisturbed run comes to."""
    return final_state(finish(new_job(place, "straight"), how=ForkedRanks))


def write_config(job, kind):
    """Write the job's file and return its path."""
    tables = {name: dict(keys) for name, keys in TABLES[kind.engine].items()}
    tables.setdefault("model", {})["path"] = f"{os.path.dirname(job)}/model"
    document = job_of(
        job={"dir": str(job)},
        data={"groups": 2, "group_size": 2, "consumed": "archive"},
        sync={"save_timeout": 30.0, "interval": kind.sync},
        trainer={
            "nproc": kind.ranks,
            "total_steps": kind.steps,
            "save_interval": kind.interval,
            "max_checkpoints_to_keep": 2,
        },
        **tables,
    )
    return write_job(f"{job}.toml", document)


def start(job, kind=WHOLE):
    """Start a trainer in a session of its own."""
    command = [sys.executable, "-m", "trainer", "train", write_config(job, kind)]
    with open(f"{job}.log", "ab") as log:
        return subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)


class ForkedRanks:
    """Ranks that nobody but the test watches over, forked from a process that has imported what they need.

    Args:
        job: The job directory.
        kind: What they train.
    """

    def __init__(self, job, kind):
        path = write_config(job, kind)
        # Sums of as many parts as in the undisturbed run, or bits differ.
        threads = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
        shared = {"WORLD_SIZE": kind.ranks, "LOCAL_WORLD_SIZE": kind.ranks, "MASTER_PORT": free_port()}
        self.ranks = [
            forked.start(
                f"{job}.log",
                ENVIRONMENT
                | threads
                | {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
                | {name: str(value) for name, value in shared.items()},
                *("-m", "trainer", "train", path),
                kind=_FORKED_FROM,
            )
            for rank in range(kind.ranks)
        ]

    def alive(self):
        """Return the process ids of those that run."""
        return [rank.pid for rank in self.ranks if rank.poll() is None]

    def poll(self):
        """Return the exit code of the first that failed, 0 if none did, None while all of them run or end well."""
        codes = [rank.poll() for rank in self.ranks]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def wait(self, timeout):
        """Wait for all, end those that outlive one that failed by half a minute, and return as `poll` does."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, "ranks do not end"
            time.sleep(0.02)
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(_GRACE)
            rank.end()
        return self.poll()


def ranks_of(process):
    """Return the process ids of a trainer's ranks."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in children.stdout.split()]


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_work(job, process, steps):
    """Wait until this start has trained so many steps; False when it has ended before."""
    before = lines_of(job) + steps - 1
    deadline = time.monotonic() + _LONG
    while lines_of(job) <= before:
        assert time.monotonic() < deadline, tail(job)
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def lines_of(job):
    try:
        with open(f"{job}/metrics.jsonl", "rb") as file:
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0


def tail(job, length=3000):
    with open(f"{job}.log", encoding="utf-8", errors="replace") as file:
        return file.read()[-length:]


def damaged(job):
    """Return what is wrong with sealed steps, byte by byte."""
    wrong = []
    for step in sealed(str(job)):
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            found = read_manifest(LocalDisk(), f"{job}/global_step_{step}")
            wrong += [
                f"{step}/{record.name}"
                for record in (*found.shards, *found.files)
                if digest(f"{job}/global_step_{step}/{record.name}") != (record.size, record.digest)
            ]
    return wrong


def digest(path):
    with open(path, "rb") as file:
        content = file.read()
    return len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"


def final_state(job, kind=WHOLE):
    """Return what a run has come to: every byte of its training state and weights, and its cursor."""
    directory = f"{job}/global_step_{kind.steps}"
    with open(f"{directory}/training/trainer.json", encoding="ascii") as file:
        cursor = json.load(file)["sampler"]["cursor"]
    files = [
        f"{below}/{name}"
        for place in ("actor", "training")
        for below, _, names in os.walk(f"{directory}/{place}")
        for name in names
    ]
    kept = sorted(name for name in files if name.endswith((".safetensors", ".pt")))
    assert len(kept) >= 4
    assert any("/training/critic/" in name for name in kept) is (kind.engine == "ppo")
    return cursor, {os.path.relpath(name, directory): content_of(name) for name in kept}


def content_of(path):
    """Return the digest of a file; of one of torch's, those of its tensors, whose pickle may be written otherwise."""
    if not path.endswith(".pt"):
        return digest(path)
    with zipfile.ZipFile(path) as archive:
        return [
            xxhash.xxh3_128_hexdigest(archive.read(name)) for name in archive.namelist() if "/data/" in name
        ]


def new_job(place, name, kind=WHOLE):
    """Make a job that has all its experiences, and the model of verl's engine; the tiny one makes its own."""
    if kind.engine != "tiny" and not (place / "model").exists():
        pytest.importorskip("support.samples").make_model(place / "model", tied=False, tokenizer=True)
    job = place / name
    job.mkdir()
    write_experiences(job, kind.steps + 4)
    return job


def finish(job, kind=WHOLE, how=start):
    """Run a trainer to its end and return its job."""
    process = how(job, kind)
    assert process.wait(_LONG) == 0, tail(job)
    return job


def unfinished(job):
    """Return the training states that are being written, or were when their rank was killed."""
    return glob.glob(f"{job}/.training.*")


def wait_for_random_work(job, process, draw):
    """Wait until this start has trained a few steps and a little longer; False when it has ended before."""
    found = wait_for_work(job, process, draw.randint(1, 7))
    time.sleep(draw.uniform(0, 0.4) if found else 0)
    return found


def wait_for_saving_behind(job, process, draw):
    """Wait until one of the next training states is written behind and a little longer; False at the run's end."""
    seen, more, deadline = set(unfinished(job)), draw.randint(1, 3), time.monotonic() + _LONG
    while process.poll() is None:
        assert time.monotonic() < deadline, tail(job)
        if new := set(unfinished(job)) - seen:
            seen, more = seen | new, more - 1
        if more == 0:
            time.sleep(draw.uniform(0, 0.03))
            return True
        time.sleep(0.001)
    return False


AIMED = (wait_for_saving_behind, ONLY_FULL)


@pytest.mark.parametrize(("wait", "kind"), rows([(wait_for_random_work, WHOLE), AIMED], AIMED))
def test_a_run_killed_again_and_again_ends_like_an_undisturbed_one(place, straight, record_line, wait, kind):
    killed = new_job(place, f"killed-{wait.__name__}")
    draw, done, resumed, halfway, left = random.Random(SEED), 0, [], 0, set()
    aims = wait is wait_for_saving_behind
    while done < KILLS or (aims and not halfway and done < 4 * KILLS):
        process = ForkedRanks(killed, kind)
        if not wait(killed, process, draw):
            # It has reached the end before it could be killed: begin again from nothing.
            assert process.wait(_LONG) == 0, tail(killed)
            assert final_state(killed) == straight
            killed = new_job(place, f"killed-{wait.__name__}-{done}")
            continue
        everyone = draw.random() < 0.5
        ranks = process.alive()
        kill(ranks if everyone else draw.sample(ranks, 1) if ranks else [])
        code = process.wait(_LONG)
        done += 1
        assert code != 0 or not ranks, "a rank was killed and nobody noticed"
        announced = marker(str(killed))
        resumed.append(announced)
        halfway += bool(set(unfinished(killed)) - left)
        left = set(unfinished(killed))
        assert not damaged(killed), f"after kill {done}"
    assert final_state(finish(killed, kind)) == straight
    assert halfway or not aims, "no kill came while a training state was written"
    record_line(
        f"kill -9 of ranks ({wait.__name__}): {done} kills, {halfway} of them with a training state half"
        f" written, seed {SEED}; markers at the kills: {resumed}"
    )


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_run_saves_exits_with_75_and_resumes(place, straight, number):
    stopped = new_job(place, f"stopped-{number}")
    process = start(stopped)
    assert wait_for_work(stopped, process, 2)
    process.send_signal(number)
    assert process.wait(_LONG) == 75, tail(stopped)
    announced = marker(str(stopped))
    assert os.path.exists(f"{stopped}/global_step_{announced}/.full_checkpoint")
    finish(stopped, how=ForkedRanks)
    assert '"event": "training_resumed"' in tail(stopped, 1 << 20)
    assert final_state(stopped) == straight


@LONG
@pytest.mark.skipif(ENGINE != "tiny", reason="the other runs take long enough")
def test_a_killed_run_with_a_critic_ends_like_an_undisturbed_one(place, record_line):
    pytest.importorskip("verl", reason="needs verl")
    whole = final_state(finish(new_job(place, "ppo-straight", SHORT), SHORT), SHORT)
    killed, draw = new_job(place, "ppo-killed", SHORT), random.Random(SEED)
    process = start(killed, SHORT)
    if wait_for_work(killed, process, 2):
        time.sleep(draw.uniform(0, 0.4))
        kill([*ranks_of(process), process.pid])
    process.wait(_LONG)
    announced = marker(str(killed))
    assert final_state(finish(killed, SHORT), SHORT) == whole
    record_line(f"kill -9 of an actor with its critic, seed {SEED}; marker at the kill: {announced}")
