"""`trainer republish`, killed at random again and again: nothing that it published is lost, torn or mixed."""

import hashlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support import forked  # noqa: E402
from test_republish import published, republish, republishing, until  # noqa: E402

from syncd.cli.main import run  # noqa: E402
from syncd.errors import SyncdError  # noqa: E402
from syncd.synchronizer import Synchronizer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("SYNCD_REPUBLISH_KILLS", "3"))
SEED = int(os.environ.get("SYNCD_SEED", "1"))
ROWS = 1 << 20
LATEST = 1.5
"""Seconds from the first sign of a copy to the kill at most: beyond what a copy takes."""


class VerlJob:
    """A job of verl's that goes on, goes back and writes steps again."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory, self._chance = directory, chance
        self.step, self.contents = 0, dict[int, set[str]]()

    def save(self, moves: Sequence[int] = (1, 1, 1, 0, -1)) -> None:
        """Write the next step, the same one again or the one before."""
        self.step = max(1, self.step + self._chance.choice(moves))
        tensor = torch.full((ROWS,), self._chance.random())
        actor = self.directory / f"global_step_{self.step}/actor"
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        config = {"architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
        (actor / "huggingface/config.json").write_text(json.dumps(config))
        torch.save({"model.norm.weight": tensor}, actor / "new.pt")
        os.replace(actor / "new.pt", actor / "model_world_size_1_rank_0.pt")
        (self.directory / "latest_checkpointed_iteration.txt").write_text(str(self.step))
        self.newest = _digest(tensor.numpy().tobytes())
        self.contents.setdefault(self.step, set()).add(self.newest)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read(out: Path) -> tuple[int, str]:
    """Return the newest version of the second job and what its weights are, all of them."""
    with Synchronizer.open(out) as reader:
        tensors, step = reader.get_model_state_dict()
        assert isinstance(tensors, dict)
        assert list(tensors) == ["model.norm.weight"]
        return step, _digest(bytes(tensors["model.norm.weight"].data))


@contextmanager
def republishing_until_killed(job: Path, out: Path, log: Path) -> Iterator[forked.Process]:
    process = republish(job, out, log)
    try:
        yield process
    finally:
        process.end()


def has_begun(out: Path, step: int, before: int, process: forked.Process, said: str) -> bool:
    """Return whether a copy has begun since a time, is done already, or cannot be made before the next step."""
    if "no earlier step" in process.said().removeprefix(said):
        return True
    scratch, directory = out.parent / f".{out.name}.import", out / f"global_step_{step}"
    return scratch.exists() or (directory.exists() and directory.stat().st_mtime_ns > before)


def has(out: Path, job: VerlJob) -> bool:
    """Return whether the newest version of the second job is what the first one wrote last."""
    try:
        return published(out) == job.step and read(out) == (job.step, job.newest)
    except SyncdError:  # it is being replaced
        return False


def test_a_republisher_killed_at_random_loses_and_tears_nothing(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    job, out, log = VerlJob(tmp_path / "verl", chance), tmp_path / "ours", tmp_path / "log"
    job.directory.mkdir()
    for _ in range(KILLS):
        job.save()
        before, said = time.time_ns(), log.read_text() if log.exists() else ""
        with republishing_until_killed(job.directory, out, log) as process:
            until(partial(has_begun, out, job.step, before, process, said), process)
            time.sleep(chance.uniform(0, LATEST))
        if published(out) >= 0:
            step, weights = read(out)
            assert weights in job.contents[step], f"step {step} is what the first job never had"
    job.save([1])  # whatever waits for an earlier step to serve meanwhile need not be copied any more
    with republishing(job.directory, out, log) as process:
        until(lambda: has(out, job), process)
    assert read(out) == (job.step, job.newest)
    assert run(["verify", str(out), "--deep"]) == 0
    assert not (tmp_path / ".ours.import").exists()
    for name in os.listdir(out):
        if name.startswith("global_step_"):
            assert run(["verify", str(out), name.removeprefix("global_step_")]) == 0
