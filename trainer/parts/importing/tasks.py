"""Tasks of other projects, as sets of `[[explorer.task_sets]]` or an environment."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.parts.importing.configuration import CannotMapError, Configuration, as_flag, as_text

TASKS = ("explorer.tasks", "explorer.task_sets", "explorer.agent.environment")
"""The keys of which one names the tasks."""

_FILES = (".jsonl", ".parquet")
_FILTER = re.compile(r"orchestrator\.(?:filters|pre_batch_filters|post_batch_filters)\.")
_SOURCE = "orchestrator.train.source"
_TASKSET = "buffer.explorer_input.taskset"
_ONE_TURN = frozenset(f"{begin}{kind}_workflow" for begin in ("", "async_") for kind in ("simple", "math"))
"""Workflows whose messages are a system prompt and the question."""

_MATH = "math_reward"
"""The reward with which the workflows `math` have a system prompt of their own, if none is config."""


def _are_chosen(config: Configuration) -> bool:
    """Return whether the user names tasks beside the file, or an environment, which has its own."""
    return any(key in config.chosen for key in TASKS)


def verl_tasks(config: Configuration) -> dict[str, Any]:
    """Return verl's files of tasks, which are read as they are, and their columns."""
    named = ((f"{name}_key", config.get(f"data.{name}_key")) for name in ("prompt", "answer"))
    columns = {name: as_text(value) for name, value in named if value is not None}
    of_all = {f"explorer.{name}": value for name, value in columns.items()}
    if _are_chosen(config):
        return of_all
    train, held_out = (_files(config.all.get(f"data.{name}_files")) for name in ("train", "val"))
    measured = {"explorer.evaluation.tasks": held_out[0]} if len(held_out) == 1 else {}
    if len(train) > 1:
        sets = {"explorer.task_sets": _file_sets(train, columns)}
        return {**sets, **measured, **(of_all if measured else {})}
    return {**of_all, **measured, "explorer.tasks": train[0] if train else None}


def _files(value: Any) -> list[str]:
    """Return the files that a value names; none if one of them is no JSONL or Parquet file of this host."""
    files = [value] if isinstance(value, str) else value
    return list(files) if isinstance(files, list) and all(map(_is_file, files)) else []


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(_FILES) and "://" not in name


def _file_sets(files: Sequence[str], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    stems = [os.path.splitext(os.path.basename(file))[0] for file in files]
    if len(set(stems)) < len(stems):
        folders = [os.path.basename(os.path.dirname(file)) for file in files]
        stems = [f"{folder}-{stem}".lstrip("-") for folder, stem in zip(folders, stems, strict=True)]
    twice = {name for name, count in Counter(stems).items() if count > 1}
    names = [f"{name}-{number}" if name in twice else name for number, name in enumerate(stems, 1)]
    return [{"source": file, "name": name, **columns} for file, name in zip(files, names, strict=True)]


def _data_set(source: str, **keys: Any) -> dict[str, Any]:
    """Return the set of tasks of a data set, as `datasets.load_dataset` reads it; empty keys are left out."""
    return {"source": f"datasets:{source}", **{key: value for key, value in keys.items() if value}}


def trinity_tasks(config: Configuration, **columns: str | None) -> list[dict[str, Any]] | None:
    """Return the data set of Trinity-RFT's tasks; what is no data set is left to the user."""
    path, kind = config.all.get(f"{_TASKSET}.path"), config.all.get(f"{_TASKSET}.storage_type", "file")
    if _are_chosen(config) or not isinstance(path, str) or kind != "file":
        return None
    keys = {name: as_text(value or "") for name, value in columns.items()}
    return [_data_set(path, **keys, **_messages(config))]


def _messages(config: Configuration) -> dict[str, Any]:
    """Return how a workflow of one turn makes messages of a question; others make their own."""
    workflow = config.get("buffer.explorer_input.default_workflow_type", "")
    workflow = as_text(config.get(f"{_TASKSET}.default_workflow_type", workflow))
    system = config.get(f"{_TASKSET}.format.system_prompt")
    reward = config.get("buffer.explorer_input.default_reward_fn_type", _MATH)
    has_own = "math" in workflow and config.get(f"{_TASKSET}.default_reward_fn_type", reward) == _MATH
    if workflow not in _ONE_TURN or (system is None and has_own):
        return {}
    return {"system": system} if system else {"chat": True}


def trl_tasks(config: Configuration, *, measured: bool) -> dict[str, Any]:
    """Return the split of TRL's data set for training and, if it is measured, the one for tests."""
    name = config.all.get("dataset_name")
    if _are_chosen(config) or not isinstance(name, str):
        return {}
    column = as_text(config.get("dataset_prompt_column", ""))
    columns = {"prompt_key": column, "system": as_text(config.get("system_prompt", "")), "chat": bool(column)}
    subset = as_text(config.get("dataset_config", ""))
    train, test = (as_text(config.get(f"dataset_{split}_split", split)) for split in ("train", "test"))
    sets = [_data_set(name, subset=subset, split=train, **columns)]
    if not measured:
        return {"explorer.task_sets": sets}
    held_out = f"{os.path.basename(name.rstrip('/'))}-{test}"
    sets.append(_data_set(name, name=held_out, subset=subset, split=test, held_out=True, **columns))
    return {"explorer.task_sets": sets, "explorer.evaluation.tasks": f"set:{held_out}"}


def verifiers_environment(config: Configuration) -> dict[str, Any]:
    """Return prime-rl's environment of verifiers, if there is one; its `env` table is ours too."""
    others = any(
        key.startswith(f"{_SOURCE}.") and not key.startswith(f"{_SOURCE}.0.") for key in config.values
    )
    if _are_chosen(config) or others:
        return {}
    table = f"{_SOURCE}.0.env"
    values = config.below(table)
    taskset, kind = (values.pop(name, None) for name in ("taskset.id", "id"))
    has_lists = any(part.isdigit() for key in values for part in key.split("."))
    if has_lists or not isinstance(taskset, str):
        return {}
    for key, value in values.items():
        if key.endswith("runtime.type") and value != "subprocess":
            raise CannotMapError("environments run on the explorer's host", f"--set {table}.{key}=subprocess")
    options = {f"explorer.agent.options.{key}": value for key, value in values.items()}
    name = f"{kind}+{taskset}" if kind else taskset
    return {"explorer.agent.environment": f"verifiers:{name}", **options}


def prime_filters(config: Configuration) -> str | None:
    """Return that groups without an advantage are replaced; prime-rl's other filters may only count."""
    tables = {key.rpartition(".")[0] for key in config.values if _FILTER.match(key) and key.endswith(".type")}
    replaced = False
    for table in sorted(tables):
        is_zero = as_text(config.get(f"{table}.type", "")) == "zero_advantage"
        is_enforced = as_flag(config.get(f"{table}.enforce", is_zero))
        if is_enforced and not is_zero:
            raise CannotMapError(
                "leaves rollouts out, which is not done here", f"--set {table}.enforce=false"
            )
        replaced |= is_enforced and "pre_batch" in table
    return "drop" if replaced else None
