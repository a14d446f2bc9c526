"""Starts a new job from a step of another trainer's: from its weights, or with optimizer and schedule too."""

import os
from collections.abc import Callable
from functools import partial

from syncd.errors import UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import parse_step_name
from trainer.parts.importing.apply import Entry, Outcome

Export = Callable[[JobFile], None]  # writes what the new job starts from, given the job's configuration


def enter_start(outcome: Outcome, checkpoint: str | None, to: str | None, *, resume: bool) -> Export | None:
    """Return what writes the start of the new job, None without a step; enter the model that its weights become.

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
        outcome.entries.pop("trainer.continue_from_checkpoint", None)  # their run may have begun anew
        return partial(export_training, os.path.dirname(path), step)
    return _start_weights(outcome, path, step, to)


def _start_weights(outcome: Outcome, path: str, step: int, to: str) -> Export:
    name, origin = f"{os.path.splitext(os.path.basename(to))[0]}-start", f"{path}, exported"
    critic = outcome.value("critic.enabled") is True and os.path.isdir(f"{path}/critic")
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
    return partial(_export_weights, os.path.dirname(path), step, out, critic=critic)


def _export_weights(source: str, step: int, out: str, _: JobFile, *, critic: bool) -> None:
    """Write the weights of a step as Hugging Face directories, in float32 as they are trained.

    Args:
        source: The directory of the other trainer's job.
        critic: Whether the critic's go there too, with `-critic` at the end of the name.
    """
    from trainer.export import export  # noqa: PLC0415 - it imports torch

    export(source, step, out, "float32")
    if critic:
        export(source, step, f"{out}-critic", "float32", critic=True)


def export_training(source: str, step: int, config: JobFile) -> None:
    """Write a step with its training state as a full checkpoint of the new job."""
    from trainer.parts.importing.full_checkpoint import write_full_checkpoint  # noqa: PLC0415 - it imports torch

    write_full_checkpoint(config, source, step)
