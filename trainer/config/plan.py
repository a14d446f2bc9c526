"""The stages of a file: each a whole configuration of its own, all checked together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncd.jobfile.layers import Layer
from syncd.jobfile.problems import Problem, error_of, shown
from syncd.protocol.layout import is_identity
from trainer.config.job_config import moved_to, planned_job_dir, settle_job_dir
from trainer.config.load import HINT, command_layer, file_layer, validated, with_source
from trainer.config.model import JobConfig

_WHOLE_FILE = (("job", "dir"), ("job", "state_dir"), ("trainer", "continue_from_checkpoint"))
"""What a stage cannot have of its own."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Args:
        name: Its directory below that of all stages.
        config: Its configuration; `job.dir` is its own directory.
        follows: Whether its model is what the stage before leaves, whatever `config` says.
    """

    name: str
    config: JobConfig
    follows: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages of a file.

    Args:
        whole: What the stages have in common; `job.dir` is the directory of all.
        stages: In their order.
    """

    whole: JobConfig
    stages: tuple[Stage, ...]


def load_stages(path: str, overrides: Sequence[str] = ()) -> Plan:
    """Return the stages of a file, all of them checked, with the command line on top of each.

    Raises:
        ConfigError: Everything that is wrong with any of them.
        UsageError: The overrides are not `--section.key value`.
    """
    whole, command = file_layer(path), command_layer(overrides)
    entries = whole.table.get("stages")
    if problems := [*_entry_problems(entries, path), *_command_problems(command)]:
        raise error_of(problems, HINT)
    common = replace(whole, table={name: part for name, part in whole.table.items() if name != "stages"})
    configs: list[JobConfig] = []
    for entry in entries or ():
        config, found = validated([common, _stage_layer(entry, common), command])
        problems += [problem for problem in found if problem not in problems]
        configs += [with_source(config, path)] if config else []
    if problems:
        raise error_of(problems, HINT)
    names = [(entry["name"], "path" in entry.get("model", {})) for entry in entries or ()]
    stages = [
        Stage(name, _placed(config, config.job.dir, name), number > 0 and not has_model)
        for number, (config, (name, has_model)) in enumerate(zip(configs, names, strict=True))
    ]
    return Plan(configs[0], tuple(stages))


def settled(plan: Plan) -> Plan:
    """Make the directory of all stages, a new one beside it where that is asked for, and return the plan with it.

    Raises:
        StorageError: It cannot be made.
    """
    return _moved(plan, settle_job_dir(plan.whole))


def planned(plan: Plan) -> Plan:
    """Return the plan as `settled` would now; nothing is made.

    Raises:
        StorageError: A directory cannot be read.
    """
    return _moved(plan, moved_to(plan.whole, planned_job_dir(plan.whole)))


def _moved(plan: Plan, whole: JobConfig) -> Plan:
    stages = [
        replace(stage, config=_placed(_in(stage.config, whole), whole.job.dir, stage.name))
        for stage in plan.stages
    ]
    return Plan(whole, tuple(stages))


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
            yield Problem(key, f"{key} is of all stages together", "give it outside [[stages]]", where)


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


def _in(config: JobConfig, whole: JobConfig) -> JobConfig:
    """Return a stage's configuration with the state directory and the way to go on of the whole."""
    goes_on = {"continue_from_checkpoint": whole.trainer.continue_from_checkpoint}
    return config.model_copy(
        update={
            "job": config.job.model_copy(update={"state_dir": whole.job.state_dir}),
            "trainer": config.trainer.model_copy(update=goes_on),
        }
    )
