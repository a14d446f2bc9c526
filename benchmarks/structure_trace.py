"""A weight's way, counted: the product's files and functions that one save, its publication and one load enter.

An engine of this file saves its weights as `sync.method = "checkpoint"` does, a daemon of its own process publishes
the step, and a follower loads it into the parameters of a model. `benchmarks/structure.py --trace` prints the result.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from syncd.transports.ranks import Ranks
from trainer.engines.base import EngineContext
from trainer.engines.files import FileEngine
from trainer.experience.batch import Batch

ROOT = Path(__file__).parents[1]
PACKAGES = ("syncd", "trainer", "explorer_hooks")
_HEARTBEAT = "syncd-heartbeat"
"""The thread whose calls do not count: a heartbeat falls due in a slow run alone."""

_WAIT = 60.0


class _Trace:
    """Notes each function of the product that is entered while it is active, in all threads that begin after it."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, str]] = set()
        self._active = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextlib.contextmanager
    def of(self) -> Iterator[set[tuple[str, str]]]:
        """Collect what is entered inside."""
        self.entered, self._active = set(), True
        try:
            yield self.entered
        finally:
            self._active = False

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if not self._active or event != "call":
            return
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and code.co_name != "<module>":
            name = str(path.relative_to(ROOT))
            is_heartbeat = threading.current_thread().name == _HEARTBEAT
            if name.split("/", maxsplit=1)[0] in PACKAGES and not is_heartbeat:
                self.entered.add((name, code.co_qualname))


class _Engine(FileEngine):
    """An engine whose model is one layer."""

    def build(self) -> None:
        """Build the model."""
        self.model = torch.nn.Linear(64, 64)

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Train nothing."""
        del batch, step
        return {}

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the weights."""
        yield from self.model.state_dict().items()

    @property
    def tied(self) -> Collection[str]:
        """Return no tied names."""
        return ()

    def companions(self) -> Mapping[str, bytes]:
        """Return the model's configuration."""
        return {"config.json": b"{}"}

    def training_state(self) -> Mapping[str, bytes]:
        """Return nothing to save."""
        return {}

    def load_training_state(self, directory: str) -> None:
        """Load nothing."""


def measure() -> dict[str, object]:
    """Return the files on a weight's way, by leg."""
    trace = _Trace()
    with tempfile.TemporaryDirectory() as place:
        return _measure(Path(place), trace)


def _measure(place: Path, trace: _Trace) -> dict[str, object]:
    (job := place / "job").mkdir()
    engine = _Engine(EngineContext(_config(job), Job.at(job), Ranks(), torch.device("cpu")))
    engine.prepare()
    engine.train_step(Batch((), (), (), (), ()))
    model = torch.nn.Linear(64, 64)
    with (
        _daemon(job),
        Follower.open(job, TransformersHook(model), "e0", FollowOptions(stay=True)) as follower,
    ):
        with trace.of() as saved:
            engine.sync_weight("checkpoint")
            engine.wait_for_save()
        with trace.of() as loaded:
            outcome = follower.turn(_WAIT)
        assert outcome.kind == "applied", outcome
    engine.shutdown()
    assert all(
        torch.equal(model.state_dict()[name], engine.model.state_dict()[name].bfloat16().float())
        for name in ("weight", "bias")
    )
    return {
        "files on a weight's way": sorted({name for name, _ in saved | loaded}),
        "functions on a weight's way": len(saved | loaded),
        "of these files, to save": sorted({name for name, _ in saved}),
        "of these files, to load": sorted({name for name, _ in loaded}),
    }


def _config(job: Path) -> JobFile:
    document = {
        "job": {"dir": str(job)},
        "model": {"path": "/nowhere"},
        "engine": {"name": "structure"},
        "trainer": {"total_steps": 1},
    }
    return JobFile.model_validate(document)


@contextlib.contextmanager
def _daemon(job: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--log-level", "error"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
