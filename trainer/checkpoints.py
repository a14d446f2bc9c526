"""Makes a step a full checkpoint: each part durable before the next, `.full_checkpoint` before the tracker.

The engine's ranks write the training state into a directory of this save beside the steps, `.training.SAVE`. It
becomes the step's `training/` by way of the trainer's fence; then comes `actor/huggingface/` if asked for or needed;
then `.full_checkpoint`, with which the checkpoint is complete; last the tracker and a copy of the state in the job
directory. So a trainer that was replaced, or a rank of it that writes late, writes nothing into a step.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

from syncd.errors import CorruptDataError, SyncdError, storage_error, storage_errors
from syncd.jobfile.model import JobFile
from syncd.protocol.disk import MISSING, Disk, list_if_there, remove_tree, temporary_name
from syncd.protocol.documents import Fields, encode, read_document
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, MANIFEST, Job, parse_step_name
from syncd.protocol.manifest import missing_files, read_manifest

TRAINING = "training"
CRITIC = "critic"
"""Where in the training state that of a critic is, if there is one."""

HUGGINGFACE = "huggingface"
META = "trainer_meta.json"
_WRITE_WHOLE = "syncd.transports.delta.materialise:write_whole"
_STATE = "trainer.json"
_STAGED = f".{TRAINING}."
_WRITTEN = ".written-"
"""Begins the name of a rank's note that its files are durable; removed before the directory becomes `training/`."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The loop's state at a step."""

    step: int  # steps trained so far
    generation: int  # the generation of the versions that it published
    world_size: int  # ranks that saved it
    sampler: Mapping[str, Any] = field(default_factory=dict)  # the state of the sample strategy
    critic: bool = False  # whether the training state holds a critic's
    selection: Mapping[str, Any] = field(default_factory=dict)  # what steps have been compared
    # Which evaluations have been given to the monitors.
    evaluations: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {"protocol": 1, **asdict(self)}


def training_directory(job: Job, step: int) -> str:
    return f"{job.step(step)}/{TRAINING}"


def begin_training(job: Job, save: str, fence: str = "") -> str:
    """Make the empty directory of a new save of an engine's training state, and remove what earlier ones left."""
    with storage_errors(job.root):
        left = [entry.name for entry in job.disk.list(job.root) if entry.name.startswith(_STAGED)]
        if fence:
            # After the listing: while the fence was there, no successor had begun a save.
            job.disk.list(fence)
        for name in left:
            # A rank of an earlier trainer may be stopped while it holds a file open.
            with contextlib.suppress(OSError):
                remove_tree(job.disk, f"{job.root}/{name}")
        job.disk.make_directory(staged_directory(job, save))
    return staged_directory(job, save)


def staged_directory(job: Job, save: str) -> str:
    return f"{job.root}/{_STAGED}{save}"


def is_begun(job: Job, save: str) -> bool:
    job.disk.refresh(job.root)
    return os.path.isdir(staged_directory(job, save))


def sync_files(job: Job, directory: str, names: Collection[str]) -> None:
    """Make files of this rank durable, with the modes of the job's policy."""
    with storage_errors(directory):
        parents = {os.path.dirname(f"{directory}/{name}") for name in names}
        for name in names:
            job.disk.adopt(f"{directory}/{name}")
            _sync(f"{directory}/{name}")
        for parent in parents:
            job.disk.adopt(parent)
            job.disk.sync_directory(parent)


def note_written(job: Job, directory: str, rank: int) -> None:
    with storage_errors(directory):
        job.disk.replace(f"{directory}/{_WRITTEN}{rank}", b"")


def is_written(job: Job, directory: str, count: int) -> bool:
    with storage_errors(directory):
        job.disk.refresh(directory)
        return len(_notes(job, directory)) == count


def discard_training(job: Job, save: str, fence: str) -> None:
    for place in (staged_directory(job, save), _ready_directory(job, save, fence)):
        with contextlib.suppress(OSError, SyncdError):
            remove_tree(job.disk, place)


def _ready_directory(job: Job, save: str, fence: str) -> str:
    """Return from where a training state is renamed into its step."""
    return f"{fence or job.root}/{_STAGED}{save}"


def _notes(job: Job, directory: str) -> list[str]:
    return [entry.name for entry in job.disk.list(directory) if entry.name.startswith(_WRITTEN)]


def complete(
    job: Job, step: int, state: Mapping[str, Any], *, save: str = "", as_hf: bool = False, fence: str = ""
) -> None:
    """Make a sealed step with its training state a full checkpoint. May be called again, to add `huggingface/`.

    Args:
        save: The save of the training state that is to become `training/`; empty where it is there already.
        as_hf: Whether to add `actor/huggingface/`; a step that is stored as a delta gets it anyway, of whole files.
        fence: The directory through which a trainer renames all this; one that was replaced has lost it.
    """
    disk, path, via = job.disk, job.step(step), fence or None
    with storage_errors(path):
        if save:
            staged = staged_directory(job, save)
            for note in _notes(job, staged):
                disk.unlink(f"{staged}/{note}")
            disk.replace(f"{staged}/{_STATE}", encode(state))
            _become_training(job, step, save, fence)
        else:
            disk.replace(f"{training_directory(job, step)}/{_STATE}", encode(state), via=via)
        if read_manifest(disk, path).kind == "delta":
            # By name: deltas need numpy and pyarrow, and commands that read checkpoints do not.
            _place_huggingface(disk, f"{path}/{ACTOR}", partial(resolve_name(_WRITE_WHOLE), job, step))
        elif as_hf:
            _place_huggingface(disk, f"{path}/{ACTOR}", partial(_link_all, f"{path}/{ACTOR}"))
        disk.replace(f"{path}/{FULL_CHECKPOINT}", encode({"protocol": 1, "step": step}), via=via)
        disk.replace(job.tracker, f"{step}".encode("ascii"), via=via)
        disk.replace(f"{job.root}/{META}", encode(state), via=via)


def _become_training(job: Job, step: int, save: str, fence: str) -> None:
    """Rename the training state to its name, and remove an unfinished one."""
    disk, target, ready = job.disk, training_directory(job, step), _ready_directory(job, save, fence)
    aside = _ready_directory(job, f"replaced-{uuid.uuid4().hex}", fence)
    # Without a fence this changes nothing, but fails if the save's directory is gone.
    disk.rename(staged_directory(job, save), ready)
    with contextlib.suppress(*MISSING):
        disk.rename(target, aside)
    disk.rename(ready, target)
    disk.sync_directory(job.step(step))
    remove_tree(disk, aside)


def has_huggingface(job: Job, step: int) -> bool:
    return HUGGINGFACE in {entry.name for entry in list_if_there(job.disk, f"{job.step(step)}/{ACTOR}")}


def latest_hf_directory(job: Job) -> str:
    """Return the Hugging Face directory of the newest full checkpoint, which the tracker names."""
    job.disk.refresh(job.root)
    path = job.step(int(job.disk.read(job.tracker).decode()))
    job.disk.stat(f"{path}/{FULL_CHECKPOINT}")
    whole = f"{path}/{ACTOR}/{HUGGINGFACE}"
    return whole if os.path.isdir(whole) else f"{path}/{ACTOR}"


def get_latest_hf_checkpoint_path(config: JobFile) -> str | None:
    """Return the Hugging Face directory of a job's newest full checkpoint, None before the first.

    Raises:
        StorageError: The job cannot be read.
        CorruptDataError: The tracker is damaged.
    """
    job = Job.at(config.job.dir, config.job.state_dir or None)
    try:
        return latest_hf_directory(job)
    except MISSING:
        return None
    except OSError as error:
        raise storage_error(error, job.tracker) from error
    except ValueError as error:
        raise CorruptDataError("not the number of a step", path=job.tracker) from error


def full_checkpoints(job: Job) -> list[int]:
    """Return the steps that say they are full checkpoints, ascending."""
    job.disk.refresh(job.root)
    steps = (parse_step_name(entry.name) for entry in job.disk.list(job.root) if entry.kind == "directory")
    return sorted(step for step in steps if step is not None and _is_full(job, step))


def read_state(job: Job, step: int) -> TrainerState:
    """Return the loop's state of a full checkpoint."""
    with storage_errors(job.step(step)):
        path = job.step(step)
        if wrong := missing_files(job.disk, path, read_manifest(job.disk, path)):
            raise SyncdError(wrong[0], path=path)
        training = training_directory(job, step)
        fields = read_document(job.disk, f"{training}/{_STATE}")
        critic = fields.flag("critic")
        if critic and not list_if_there(job.disk, f"{training}/{CRITIC}"):
            raise SyncdError(
                "the critic's part of the training state is missing", path=f"{training}/{CRITIC}"
            )
        numbers = fields.integer("step"), fields.integer("generation"), fields.integer("world_size", least=1)
        later = [_record_or_empty(fields, name) for name in ("selection", "evaluations")]
        return TrainerState(*numbers, fields.record("sampler").document, critic, *later)


def _record_or_empty(fields: Fields, name: str) -> Mapping[str, Any]:
    """Return a part of the state that older trainers did not write."""
    return fields.record(name).document if name in fields.document else {}


def _is_full(job: Job, step: int) -> bool:
    return {FULL_CHECKPOINT, MANIFEST} <= {entry.name for entry in list_if_there(job.disk, job.step(step))}


def _place_huggingface(disk: Disk, actor: str, fill: Callable[[str], None]) -> None:
    """Make `huggingface/`, whole or not at all."""
    target = f"{actor}/{HUGGINGFACE}"
    if os.path.isdir(target):
        return
    preparing = f"{actor}/{temporary_name(HUGGINGFACE)}"
    os.mkdir(preparing)  # without parents: the step may have been taken away
    disk.adopt(preparing)
    try:
        fill(preparing)
        disk.sync_directory(preparing)
        os.rename(preparing, target)
        disk.sync_directory(actor)
    except BaseException:
        shutil.rmtree(preparing, ignore_errors=True)
        raise


def _link_all(actor: str, directory: str) -> None:
    """Link the files of a step into a directory; without hard links, copy them."""
    for entry in os.scandir(actor):
        if entry.is_file(follow_symlinks=False) and not entry.name.startswith("."):
            _link(entry.path, f"{directory}/{entry.name}")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        _sync(target)


def _sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
