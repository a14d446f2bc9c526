"""Starts a new job from a step of another trainer's: from its weights, or with optimizer and schedule too."""

import os
from dataclasses import dataclass
from typing import Protocol

from syncd.errors import UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import parse_step_name
from trainer.parts.importing.apply import Entry, Outcome


class Start(Protocol):
    def export(self, config: JobFile) -> None:
        """Write it, given the new job's configuration."""


@dataclass(frozen=True, slots=True)
class StartWeights:
    """The weights of a step, as the model of the new job."""

    job: str  # the directory of the other trainer's job
    step: int
    out: str  # where the weights go
    critic: bool  # whether the critic's go there too, with `-critic` at the end of the name

    def export(self, config: JobFile) -> None:
        """Write the weights as Hugging Face directories, in float32 as they are trained."""
        from trainer.export import export  # noqa: PLC0415 - it imports torch

        del config
        export(self.job, self.step, self.out, "float32")
        if self.critic:
            export(self.job, self.step, f"{self.out}-critic", "float32", critic=True)


@dataclass(frozen=True, slots=True)
class StartResumed:
    """A step with its training state, as a full checkpoint of the new job."""

    job: str  # the directory of the other trainer's job
    step: int

    def export(self, config: JobFile) -> None:
        from trainer.parts.importing.full_checkpoint import write_full_checkpoint  # noqa: PLC0415 - it imports torch

        write_full_checkpoint(config, self.job, self.step)


def enter_start(outcome: Outcome, checkpoint: str | None, to: str | None, *, resume: bool) -> Start | None:
    """Return what the new job starts from, None without a step; enter the model that its weights become.

    The weights become `model.path` of the outcome, unless the step is resumed.
    """
    if checkpoint is None:
        return None
    path = os.path.abspath(checkpoint)
    step = parse_step_name(os.path.basename(path))
    if step is None or not os.path.isdir(path):
        raise UsageError("not a step's directory", path=checkpoint, hint="name JOB/global_step_N")
    if to is None:
        raise UsageError("--from-checkpoint needs --to", hint="its weights go beside the job's file")
    if resume:
        return StartResumed(os.path.dirname(path), step)
    return _start_weights(outcome, path, step, to)


def _start_weights(outcome: Outcome, path: str, step: int, to: str) -> StartWeights:
    name, origin = f"{os.path.splitext(os.path.basename(to))[0]}-start", f"{path}, exported"
    enabled = outcome.entries.get("critic.enabled")
    critic = enabled is not None and enabled.value is True and os.path.isdir(f"{path}/critic")
    outcome.refusals = [refusal for refusal in outcome.refusals if "--model.path" not in refusal.instead]
    outcome.entries["model.path"] = Entry(name, origin)
    if critic:
        outcome.entries["critic.path"] = Entry(f"{name}-critic", origin)
    else:
        outcome.entries.pop("critic.path", None)
    outcome.by_hand["the optimizer"] = (
        "starts anew, and so do schedule and step number; --resume takes them too"
    )
    out = os.path.join(os.path.dirname(os.path.abspath(to)), name)
    return StartWeights(os.path.dirname(path), step, out, critic)
