"""Runs the stages of one file, one after the other: each is a job that starts from the model of the stage before."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncd.errors import ConfigError, CorruptDataError, StorageError, storage_errors
from syncd.jobfile.loader import Layer
from syncd.jobfile.problems import Problem, error_of, shown
from syncd.jobfile.records import STAGES, StagesRecord, read_record
from syncd.protocol.layout import Job, is_identity
from syncd.protocol.local_disk import LocalDisk
from trainer.checkpoints import latest_hf_directory
from trainer.config.changes import Contradiction, split
from trainer.config.job_config import contradictions, make_job_dir, moved_to, next_job_dir, refuse
from trainer.config.load import LOADER, file_layer, resolved
from trainer.config.model import JobConfig

_WHOLE_FILE = (("job", "dir"), ("job", "state_dir"), ("trainer", "continue_from_checkpoint"))
"""Keys that all stages share."""


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """One stage.

    Args:
        name: Its directory below that of all stages.
        config: Its configuration; `job.dir` is its own directory.
        follows: Whether it starts from the model of the stage before, whatever `config` says.
    """

    name: str
    config: JobConfig
    follows: bool


@dataclass(frozen=True, slots=True)
class StagedRun:
    """All stages of a file.

    Args:
        whole: What the stages have in common; `job.dir` is the directory of all.
        stages: In their order.
    """

    whole: JobConfig
    stages: tuple[TrainingStage, ...]


def load_stages(path: str, overrides: Sequence[str] = ()) -> StagedRun:
    """Return the checked stages of a file, each with the command line on top.

    Raises:
        ConfigError: All problems of all stages.
        UsageError: The overrides are not `--section.key value`.
    """
    whole, command = file_layer(path), LOADER.command_layer(overrides)
    entries = whole.table.get("stages")
    if problems := [*_entry_problems(entries, path), *_command_problems(command)]:
        raise error_of(problems, LOADER.hint)
    common = replace(whole, table={name: part for name, part in whole.table.items() if name != "stages"})
    configs: list[JobConfig] = []
    for entry in entries or ():
        config, found = LOADER.validate([common, _stage_layer(entry, common), command])
        problems += [problem for problem in found if problem not in problems]
        configs += [resolved(config.with_source(path))] if config else []
    if problems:
        raise error_of(problems, LOADER.hint)
    names = [(entry["name"], "path" in entry.get("model", {})) for entry in entries or ()]
    stages = [
        TrainingStage(name, _placed(config, config.job.dir, name), number > 0 and not has_model)
        for number, (config, (name, has_model)) in enumerate(zip(configs, names, strict=True))
    ]
    return StagedRun(configs[0], tuple(stages))


def make_run_directory(plan: StagedRun) -> StagedRun:
    """Make the directory of all stages, or a new one beside it if that is configured, and return the run in it.

    Raises:
        StorageError: It cannot be made.
    """
    return _moved_to(plan, make_job_dir(plan.whole))


def planned_run(plan: StagedRun) -> StagedRun:
    """Return the run as `make_run_directory` would return it now; nothing is made.

    Raises:
        StorageError: A directory cannot be read.
    """
    return _moved_to(plan, moved_to(plan.whole, next_job_dir(plan.whole)))


def _moved_to(plan: StagedRun, whole: JobConfig) -> StagedRun:
    stages = [
        replace(stage, config=_placed(_with_shared_keys(stage.config, whole), whole.job.dir, stage.name))
        for stage in plan.stages
    ]
    return StagedRun(whole, tuple(stages))


def _entry_problems(entries: Any, path: str) -> Iterator[Problem]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        yield Problem("stages", "there is no [[stages]]", 'write [[stages]] and name = "..." for each', path)
        return
    names: list[Any] = [entry.get("name") for entry in entries]
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or not is_identity(name):
            hint = "letters, digits, '.', '_' and '-', 100 at most, none of '.' and '-' first"
            yield Problem(
                "stages.name", f"name of stage {number}, {shown(name)}, cannot be a directory", hint, path
            )
        elif name in names[: number - 1]:
            yield Problem("stages.name", f"two stages are called {name!r}", where=path)
    for entry in entries:
        yield from _misplaced(entry, f"{path}, stage {entry.get('name')!r}")


def _misplaced(entry: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for section, name in _WHOLE_FILE:
        table = entry.get(section)
        if isinstance(table, dict) and name in table:
            key = f"{section}.{name}"
            yield Problem(key, f"{key} is shared by all stages", "give it outside [[stages]]", where)


def _command_problems(command: Layer) -> Iterator[Problem]:
    if "stages" in command.table:
        yield Problem("stages", "stages are given in the file", where=command.where)


def _stage_layer(entry: Mapping[str, Any], common: Layer) -> Layer:
    table = {name: part for name, part in entry.items() if name != "name"}
    return Layer(table, f"{common.where}, stage {entry['name']!r}", common.directory)


def _placed(config: JobConfig, directory: str, name: str) -> JobConfig:
    state_dir = f"{config.job.state_dir}/{name}" if config.job.state_dir else ""
    job = config.job.model_copy(update={"dir": f"{directory}/{name}", "state_dir": state_dir})
    return config.model_copy(update={"job": job})


def _with_shared_keys(config: JobConfig, whole: JobConfig) -> JobConfig:
    """Return a stage's configuration with the keys that all stages share."""
    resume = {"continue_from_checkpoint": whole.trainer.continue_from_checkpoint}
    return config.model_copy(
        update={
            "job": config.job.model_copy(update={"state_dir": whole.job.state_dir}),
            "trainer": config.trainer.model_copy(update=resume),
        }
    )


Run = Callable[[JobConfig], int]
PrintLine = Callable[[str], None]


def run_stages(plan: StagedRun, run: Run, print_line: PrintLine, allowed: Collection[str] = ()) -> int:
    """Run the stages that are not done, in order; return 0, or the exit code of the first stage that failed.

    Args:
        plan: The stages.
        run: Trains one configuration and returns its exit code.
        print_line: Prints a line for people.
        allowed: Fixed keys that the user lets change.

    Raises:
        ConfigError: A stage contradicts its directory, or the order of an earlier run; nothing has run.
        StorageError: A stage that is done has no full checkpoint, or the directory cannot be written.
        CorruptDataError: stages.json is damaged.
    """
    plan = make_run_directory(plan)
    directory = plan.whole.job.dir
    record = read_record(directory)
    check_against(plan, record, allowed)
    for number, stage in enumerate(plan.stages):
        if stage.name in record.done:
            print_line(f"stage {stage.name}: done before")
            continue
        config = _started(plan, number, record)
        record = replace(record, models={**record.models, stage.name: config.model.path})
        _write_record(directory, record)
        print_line(f"stage {stage.name}: {number + 1} of {len(plan.stages)}, from {config.model.path}")
        if code := run(config):
            return code
        record = replace(record, done=(*record.done, stage.name))
        _write_record(directory, record)
    return 0


def preview_stages(plan: StagedRun) -> Iterator[tuple[TrainingStage, tuple[Contradiction, ...]]]:
    """Yield each stage as it would start now with its contradictions; nothing is made.

    Raises:
        CorruptDataError: stages.json is damaged.
        StorageError: It cannot be read.
    """
    plan = planned_run(plan)
    record = read_record(plan.whole.job.dir)
    before = ""
    for stage in plan.stages:
        known = record.models.get(stage.name, f"(the newest full checkpoint of stage {before})")
        config = _with_model(stage.config, known) if stage.follows else stage.config
        yield replace(stage, config=config), _contradictions(stage, record)
        before = stage.name


def pending(plan: StagedRun) -> Iterator[TrainingStage]:
    """Yield the stages that are not done and whose model is known; nothing is made.

    Raises:
        CorruptDataError: stages.json is damaged.
        StorageError: It cannot be read.
    """
    plan = planned_run(plan)
    record = read_record(plan.whole.job.dir)
    for stage in plan.stages:
        known = record.models.get(stage.name) if stage.follows else stage.config.model.path
        if known and stage.name not in record.done:
            yield replace(stage, config=_with_model(stage.config, known))


def check_against(plan: StagedRun, record: StagesRecord, allowed: Collection[str] = ()) -> None:
    """Check the stages against what earlier runs left.

    Raises:
        ConfigError: Finished stages are not the first ones, or a fixed key of a stage has changed.
    """
    names = [stage.name for stage in plan.stages]
    if tuple(names[: len(record.done)]) != record.done:
        raise ConfigError(
            f"the finished stages, {', '.join(record.done)}, are not the first of {', '.join(names)}",
            path=f"{plan.whole.job.dir}/{STAGES}",
            hint="add stages at the end, or give --trainer.continue_from_checkpoint false to start again",
        )
    found = [found for stage in plan.stages for found in _contradictions(stage, record)]
    refuse(split(found, allowed)[1])


def newest_model(directory: str) -> str:
    """Return the Hugging Face directory of a job's newest full checkpoint.

    Raises:
        StorageError: There is none.
    """
    try:
        return latest_hf_directory(Job.at(directory))
    except (OSError, ValueError, CorruptDataError) as error:
        raise StorageError(
            f"no full checkpoint is there ({error})", path=directory, hint="name the next stage's model.path"
        ) from error


def _write_record(directory: str, record: StagesRecord) -> None:
    path = f"{directory}/{STAGES}"
    document = {"done": list(record.done), "models": dict(record.models)}
    with storage_errors(path):
        LocalDisk().replace(path, f"{json.dumps(document, indent=2)}\n".encode())


def _contradictions(stage: TrainingStage, record: StagesRecord) -> tuple[Contradiction, ...]:
    # The model of a stage that follows another is fixed once the stage has started.
    model = record.models.get(stage.name) if stage.follows else None
    config = _with_model(stage.config, model) if model else stage.config
    unknown = {"model.path"} if stage.follows and not model else set()
    return contradictions(config, besides=unknown)


def _started(plan: StagedRun, number: int, record: StagesRecord) -> JobConfig:
    """Return a stage's configuration with the model that it started from, or starts from now."""
    stage = plan.stages[number]
    if not stage.follows:
        return stage.config
    known = record.models.get(stage.name)
    return _with_model(stage.config, known or newest_model(plan.stages[number - 1].config.job.dir))


def _with_model(config: JobConfig, path: str) -> JobConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
