"""The stages of one file, one after the other: each a job of its own, from the model that the one before left."""

import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from syncd.errors import ConfigError, CorruptDataError, StorageError, storage_error
from syncd.jobfile.stages import RECORD, Record, read_record
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, Job
from syncd.protocol.local_disk import LocalDisk
from trainer.config.changes import Contradiction, split
from trainer.config.job_config import contradictions, refuse
from trainer.config.model import JobConfig
from trainer.config.plan import Plan, Stage, planned, settled

Run = Callable[[JobConfig], int]
Tell = Callable[[str], None]


def run_stages(plan: Plan, run: Run, tell: Tell, allowed: Collection[str] = ()) -> int:
    """Run what is not done yet, in order, and return 0, or the exit code of the stage that ended with another one.

    Args:
        plan: The stages.
        run: Trains one configuration and returns its exit code.
        tell: Takes lines for people.
        allowed: Fixed keys that the user lets change.

    Raises:
        ConfigError: A stage contradicts its directory, or the order that was begun with; nothing has been run.
        StorageError: A stage that is done has no full checkpoint, or the directory cannot be written.
        CorruptDataError: stages.json is damaged.
    """
    plan = settled(plan)
    directory = plan.whole.job.dir
    record = read_record(directory)
    check_against(plan, record, allowed)
    for number, stage in enumerate(plan.stages):
        if stage.name in record.done:
            tell(f"stage {stage.name}: done before")
            continue
        config = _started(plan, number, record)
        record = replace(record, models={**record.models, stage.name: config.model.path})
        _write_record(directory, record)
        tell(f"stage {stage.name}: {number + 1} of {len(plan.stages)}, from {config.model.path}")
        if code := run(config):
            return code
        record = replace(record, done=(*record.done, stage.name))
        _write_record(directory, record)
    return 0


def foreseen(plan: Plan) -> Iterator[tuple[Stage, tuple[Contradiction, ...]]]:
    """Yield each stage as it would start now, and what contradicts that; nothing is made.

    Raises:
        CorruptDataError: stages.json is damaged.
        StorageError: It cannot be read.
    """
    plan = planned(plan)
    record = read_record(plan.whole.job.dir)
    before = ""
    for stage in plan.stages:
        known = record.models.get(stage.name, f"(the newest full checkpoint of stage {before})")
        config = _with_model(stage.config, known) if stage.follows else stage.config
        yield replace(stage, config=config), _contradictions(stage, record)
        before = stage.name


def pending(plan: Plan) -> Iterator[Stage]:
    """Yield the stages that are not done and whose model is known already; nothing is made.

    Raises:
        CorruptDataError: stages.json is damaged.
        StorageError: It cannot be read.
    """
    plan = planned(plan)
    record = read_record(plan.whole.job.dir)
    for stage in plan.stages:
        known = record.models.get(stage.name) if stage.follows else stage.config.model.path
        if known and stage.name not in record.done:
            yield replace(stage, config=_with_model(stage.config, known))


def check_against(plan: Plan, record: Record, allowed: Collection[str] = ()) -> None:
    """Do nothing where the stages agree with what earlier runs left.

    Raises:
        ConfigError: Finished stages are not the first ones, or a stage was started otherwise.
    """
    names = [stage.name for stage in plan.stages]
    if tuple(names[: len(record.done)]) != record.done:
        raise ConfigError(
            f"stages that are done, {', '.join(record.done)}, are not the first of {', '.join(names)}",
            path=f"{plan.whole.job.dir}/{RECORD}",
            hint="add stages at the end, or give --trainer.continue_from_checkpoint false to begin anew",
        )
    found = [found for stage in plan.stages for found in _contradictions(stage, record)]
    refuse(split(found, allowed)[1])


def newest_model(directory: str) -> str:
    """Return the Hugging Face directory of a job's newest full checkpoint.

    Raises:
        StorageError: There is none.
    """
    job = Job.at(directory)
    try:
        job.disk.refresh(job.root)
        step = job.step(int(job.disk.read(job.tracker).decode()))
        job.disk.stat(f"{step}/{FULL_CHECKPOINT}")
    except (OSError, ValueError, CorruptDataError) as error:
        raise StorageError(
            f"no full checkpoint is there ({error})", path=directory, hint="name the next stage's model.path"
        ) from error
    whole = f"{step}/{ACTOR}/huggingface"
    return whole if os.path.isdir(whole) else f"{step}/{ACTOR}"


def _write_record(directory: str, record: Record) -> None:
    path = f"{directory}/{RECORD}"
    document = {"done": list(record.done), "models": dict(record.models)}
    try:
        LocalDisk().replace(path, f"{json.dumps(document, indent=2)}\n".encode())
    except OSError as error:
        raise storage_error(error, path) from error


def _contradictions(stage: Stage, record: Record) -> tuple[Contradiction, ...]:
    # Which model a stage follows on is fixed once it has started from it, not before.
    model = record.models.get(stage.name) if stage.follows else None
    config = _with_model(stage.config, model) if model else stage.config
    unknown = {"model.path"} if stage.follows and not model else set()
    return contradictions(config, besides=unknown)


def _started(plan: Plan, number: int, record: Record) -> JobConfig:
    """Return a stage's configuration with the model that it began with, or begins with now."""
    stage = plan.stages[number]
    if not stage.follows:
        return stage.config
    known = record.models.get(stage.name)
    return _with_model(stage.config, known or newest_model(plan.stages[number - 1].config.job.dir))


def _with_model(config: JobConfig, path: str) -> JobConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
