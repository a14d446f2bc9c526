"""Runs the stages of one file, one after the other: each is a job that starts from the model of the stage before."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from syncd.errors import ConfigError, CorruptDataError, StorageError, storage_errors
from syncd.jobfile.loader import Layer
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, error_of, shown
from syncd.jobfile.stages_file import STAGES, StagesRecord, read_record
from syncd.protocol.layout import Job, is_identity
from syncd.protocol.local_disk import LocalDisk
from trainer.checkpoints import latest_hf_directory
from trainer.config.changes import Contradiction, split
from trainer.config.job_config import contradictions, make_job_dir, next_job_dir, refuse
from trainer.config.load import LOADER, file_layer, resolved

_WHOLE_FILE = (("job", "dir"), ("job", "state_dir"), ("trainer", "continue_from_checkpoint"))
"""Keys that all stages share."""


@dataclass(frozen=True, slots=True)
class TrainingStage:
    name: str  # its directory below that of all stages
    config: JobFile  # its configuration; `job.dir` is its own directory
    follows: bool  # whether it starts from the model of the stage before, whatever `config` says


@dataclass(frozen=True, slots=True)
class StagedRun:
    whole: JobFile  # what the stages have in common; `job.dir` is the directory of all
    stages: tuple[TrainingStage, ...]  # in their order


def load_stages(path: str, overrides: Sequence[str] = (), *, trust: bool = False) -> StagedRun:
    """Return the checked stages of a file, each with the command line on top; `trust` is as of `load_config`."""
    whole, command = file_layer(path), LOADER.command_layer(overrides)
    entries: Any = whole.table.get("stages")
    if problems := [*_entry_problems(entries, path), *_command_problems(command)]:
        raise error_of(problems, LOADER.hint)
    stages: list[TrainingStage] = []
    for entry in entries:
        layers = [*whole.of_stage(entry), command]
        config, stage_problems = LOADER.validate(layers)
        if not trust:
            LOADER.require_own_code(layers)
        problems += [problem for problem in stage_problems if problem not in problems]
        if config:
            follows = bool(stages) and "path" not in entry.get("model", {})
            if follows and stages[-1].config.model.publishes_adapters:
                problems.append(_no_model(stages[-1].name, entry["name"]))
            stages.append(TrainingStage(entry["name"], resolved(config.with_source(path)), follows))
    if problems:
        raise error_of(problems, LOADER.hint)
    return _placed(stages[0].config, stages)


def _placed(whole: JobFile, stages: Iterable[TrainingStage]) -> StagedRun:
    """Return the run whose stages lie below `whole.job.dir`, with the keys that all stages share."""
    shared = {"dir": whole.job.dir, "state_dir": whole.job.state_dir}
    resume = {"continue_from_checkpoint": whole.trainer.continue_from_checkpoint}
    placed = (
        replace(stage, config=stage.config.with_values(job=shared, trainer=resume).in_stage(stage.name))
        for stage in stages
    )
    return StagedRun(whole, tuple(placed))


def _no_model(before: str, name: str) -> Problem:
    text = f"stage {name} starts from the last step of stage {before}, whose steps are adapters and no models"
    return Problem(
        "model.lora.publish", text, f'publish = "merged" in stage {before}, or a model.path of its own'
    )


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


Run = Callable[[JobFile], int]
PrintLine = Callable[[str], None]


def run_stages(plan: StagedRun, run: Run, print_line: PrintLine, allowed: Collection[str] = ()) -> int:
    """Run the stages that are not done, in order; return 0, or the exit code of the first stage that failed."""
    plan = _placed(make_job_dir(plan.whole), plan.stages)
    directory = plan.whole.job.dir
    record = read_record(directory)
    check_against(plan, record, allowed)
    for number, stage in enumerate(plan.stages):
        if stage.name in record.done:
            print_line(f"stage {stage.name}: done before")
            continue
        config = _started(plan, number, record)
        record = _update(directory, record, models={**record.models, stage.name: config.model.path})
        print_line(f"stage {stage.name}: {number + 1} of {len(plan.stages)}, from {config.model.path}")
        if code := run(config):
            return code
        record = _update(directory, record, done=(*record.done, stage.name))
    return 0


def preview_stages(plan: StagedRun) -> Iterator[tuple[TrainingStage, tuple[Contradiction, ...]]]:
    """Yield each stage as it would start now with its contradictions; nothing is made."""
    plan, record = _planned(plan)
    before = ""
    for stage in plan.stages:
        shown_model = f"(the newest full checkpoint of stage {before})"
        yield _with_model(stage, record, shown_model), _contradictions(stage, record)
        before = stage.name


def pending(plan: StagedRun) -> Iterator[TrainingStage]:
    """Yield the stages that are not done and whose model is known; nothing is made."""
    plan, record = _planned(plan)
    for stage in plan.stages:
        resolved = _with_model(stage, record)
        if resolved.config.model.path and stage.name not in record.done:
            yield resolved


def _planned(plan: StagedRun) -> tuple[StagedRun, StagesRecord]:
    plan = _placed(next_job_dir(plan.whole), plan.stages)
    return plan, read_record(plan.whole.job.dir)


def check_against(plan: StagedRun, record: StagesRecord, allowed: Collection[str] = ()) -> None:
    names = [stage.name for stage in plan.stages]
    if tuple(names[: len(record.done)]) != record.done:
        raise ConfigError(
            f"the finished stages, {', '.join(record.done)}, are not the first of {', '.join(names)}",
            path=f"{plan.whole.job.dir}/{STAGES}",
            hint="add stages at the end, or give --trainer.continue_from_checkpoint false to start again",
        )
    contradictions = [
        contradictions for stage in plan.stages for contradictions in _contradictions(stage, record)
    ]
    refuse(split(contradictions, allowed)[1])


def newest_model(directory: str) -> str:
    try:
        return latest_hf_directory(Job.at(directory))
    except (OSError, ValueError, CorruptDataError) as error:
        raise StorageError(
            f"there is no full checkpoint ({error})", path=directory, hint="name the next stage's model.path"
        ) from error


def _update(directory: str, record: StagesRecord, **changes: Any) -> StagesRecord:
    """Return the record with the changes, written durably."""
    path, record = f"{directory}/{STAGES}", replace(record, **changes)
    with storage_errors(path):
        LocalDisk().replace(path, f"{json.dumps(asdict(record), indent=2)}\n".encode())
    return record


def _contradictions(stage: TrainingStage, record: StagesRecord) -> tuple[Contradiction, ...]:
    # The model of a stage that follows another is fixed once the stage has started.
    unknown = {"model.path"} if stage.follows and stage.name not in record.models else set()
    return contradictions(_with_model(stage, record).config, besides=unknown)


def _started(plan: StagedRun, number: int, record: StagesRecord) -> JobFile:
    """Return a stage's configuration with the model that it started from, or starts from now."""
    stage = plan.stages[number]
    is_known = not stage.follows or stage.name in record.models
    return _with_model(
        stage, record, "" if is_known else newest_model(plan.stages[number - 1].config.job.dir)
    ).config


def _with_model(stage: TrainingStage, record: StagesRecord, otherwise: str = "") -> TrainingStage:
    """Return the stage with the model that it started from; `otherwise` if it follows one and has not started."""
    if not stage.follows:
        return stage
    path = record.models.get(stage.name, otherwise)
    return replace(stage, config=stage.config.with_values(model={"path": path}))
