"""Decides what the trainer does next: pure functions over facts."""

from dataclasses import dataclass

from syncd.client.sync_policy import trainer_needs_sync
from syncd.errors import SyncdError
from syncd.jobfile.model import JobFile
from trainer.config.algorithms import SFT
from trainer.experience.batch import Batch


@dataclass(frozen=True, slots=True)
class Train:
    batch: Batch


@dataclass(frozen=True, slots=True)
class Sync:
    """Publish the weights of this step."""


@dataclass(frozen=True, slots=True)
class Save:
    """Save a full checkpoint of this step, which publishes its weights too."""

    block: bool  # whether the loop waits until it is durable
    as_hf: bool  # whether it gets a complete Hugging Face directory


@dataclass(frozen=True, slots=True)
class Validate:
    """Measure the loss of the examples of `data.validation_path`."""


@dataclass(frozen=True, slots=True)
class Idle:
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # why, in a few words
    error: SyncdError | None = None  # what went wrong, None where nothing did
    again: bool = False  # whether a later start resumes the run
    # Whether the samples' state is known to be whole, so that a checkpoint may be saved despite the error.
    intact: bool = True
    is_done: bool = False  # whether the run has reached all that it was started for


Action = Train | Sync | Save | Validate | Idle | Finish


@dataclass(frozen=True, slots=True)
class LoopFacts:
    step: int  # steps trained so far
    synced: int = 0  # the step whose weights were published last
    saved: int = 0  # the step of the last full checkpoint, 0 before the first
    saved_as_hf: bool = False  # whether that one has a Hugging Face directory
    validated: int = 0  # the step at which the loss of validation was measured last
    # The step at which a full checkpoint was tried last; what failed is tried again at the next interval.
    tried: int = 0
    ending: str = ""  # why no further step will be trained, empty while there will
    interrupted: bool = False  # whether the run ends only for now
    explorer_asks: bool = False  # whether an explorer waits for weights
    is_watched: bool = True  # whether anybody follows the versions, or may do so unseen


def end_of(config: JobFile, step: int, over: str) -> str:
    """Return why no further step will be trained, empty while there will; `over` is why there are no more samples."""
    total = config.trainer.total_steps
    return f"total_steps {total} reached" if total is not None and step >= total else over


def need_sync(config: JobFile, now: LoopFacts) -> bool:
    sync = config.sync
    due = trainer_needs_sync(sync.style, now.step, now.synced, sync.interval, explorer_asks=now.explorer_asks)
    return now.step > 0 and now.is_watched and due


def publishes_only_to_watchers(config: JobFile) -> bool:
    """Return whether weights are published only while an explorer lives, apart from full checkpoints."""
    unwatched = config.sync.unwatched
    return unwatched == "skip" or (unwatched == "auto" and config.algorithm.name == SFT)


def need_save(config: JobFile, now: LoopFacts) -> bool:
    """Return whether a full checkpoint is due: at each interval, and always at the end."""
    if now.step == 0:
        return False
    if now.saved == now.step:
        return save_as_hf(config, now) and not now.saved_as_hf
    interval = config.trainer.save_interval
    return bool(now.ending) or (interval > 0 and now.step % interval == 0 and now.tried != now.step)


def save_as_hf(config: JobFile, now: LoopFacts) -> bool:
    wanted = config.trainer.save_hf_checkpoint
    return wanted == "always" or (wanted == "last" and bool(now.ending) and not now.interrupted)


def need_validation(config: JobFile, now: LoopFacts) -> bool:
    if not config.data.validation_path or now.step == now.validated:
        return False
    interval = config.trainer.validation_interval
    return (bool(now.ending) and not now.interrupted) or (interval > 0 and now.step % interval == 0)


def due_action(config: JobFile, now: LoopFacts) -> Save | Sync | Validate | Finish | None:
    """Return the action that is due before another step is trained, None if none is.

    A save publishes the weights too, so one save serves when a sync and a save fall together.
    """
    if need_validation(config, now):
        return Validate()
    if need_save(config, now):
        return Save(block=bool(now.ending), as_hf=save_as_hf(config, now))
    if need_sync(config, now):
        return Sync()
    return Finish(now.ending, again=now.interrupted) if now.ending else None
