"""What tests of the loop share: a small job's file, experiences, a trainer of one rank in this process."""

import contextlib
import sys

import torch

from support.job_file import tiny_job
from support.paths import PYTHONPATH, TESTS, TINY_ENGINE
from syncd.errors import NonFiniteError, StorageError
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from syncd.synchronizer import Synchronizer
from syncd.transports.ranks import Ranks
from trainer.engines.base import EngineContext, make_engine
from trainer.loop import Trainer
from trainer.rank0 import Rank0
from trainer.resume import find_state
from trainer.sampling import make_strategy
from trainer.stopping import StopSignals

HERE = f"{TESTS}/trainer"
INSTALLED = str(TINY_ENGINE)
ENVIRONMENT = {"PYTHONPATH": PYTHONPATH}


def small_config(job, **sections):
    """Return the file of a job that trains the tiny engine; sections are updated by keyword."""
    data = {"consumed": "archive", "wait_timeout": 30.0} | sections.pop("data", {})
    trainer = {"total_steps": 4} | sections.pop("trainer", {})
    return JobFile.model_validate(tiny_job(job, data=data, trainer=trainer, **sections))


def rollout(step, group, number, *, generation=1):
    """Return one experience; its content follows from its place."""
    return Experience(
        tokens=[1 + step % 50, 5, 6, 7 + (group * 2 + number) % 50],
        prompt_length=2,
        logprobs=[-0.1, -0.7],
        action_mask=[True, number == 0],
        reward=float(number),
        group=f"{step}-{group}",
        task=f"task-{group}",
        rollout=number,
        generation=generation,
        step=0,
    )


def write_experiences(job, steps, explorer="e0"):
    """Write what so many steps of the small job train on, one batch a step."""
    with ExperienceWriter(Job.at(job), explorer) as writer:
        for step in range(steps):
            writer.write([rollout(step, group, number) for group in range(2) for number in range(2)])


class Shown:
    """Remembers what is shown."""

    def __init__(self):
        self.records, self.previews, self.notes = [], [], []

    def log(self, metrics, step):
        self.records.append((step, dict(metrics)))

    def preview(self, batch, step):
        self.previews.append((step, batch))

    def note(self, text):
        self.notes.append(text)

    def close(self):
        pass


def make_trainer(config, sync, *, clock=None, engine=None):
    """Return a trainer of one rank that talks through an open synchronizer, and what it shows."""
    if INSTALLED not in sys.path:
        sys.path.insert(0, INSTALLED)
    job, shown = sync.job, Shown()
    context = EngineContext(config, job, Ranks(), torch.device("cpu"), sync)
    rank0 = Rank0(config, sync, make_strategy(config, job), shown, clock)
    made = (engine or make_engine)(context)
    return Trainer(made, context, StopSignals(), find_state(job), rank0), shown


def weights(job, step):
    """Return the training state of a full checkpoint of the tiny engine."""
    return torch.load(f"{job}/global_step_{step}/training/tiny_0_of_1.pt")


@contextlib.contextmanager
def prepared_trainer(config, **options):
    """Yield a trainer that is ready, and what it shows; a save that fails at the end is the test's own doing."""
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync, **options)
        made.prepare()
        try:
            yield made, shown
        finally:
            with contextlib.suppress(StorageError, NonFiniteError):
                made.shutdown()


def same(one, other):
    """Compare two training states bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
