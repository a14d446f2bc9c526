"""What several tables need of tasks: their files and data sets, as sets of `[[explorer.task_sets]]`."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.parts.importing.rows import Given

AGENTS = ("explorer.agent.function", "explorer.agent.command", "explorer.agent.environment")
"""The keys of which one names an agent."""

AGENT = "--explorer.agent.function package.module:function"
"""What to give where another trainer has tools, turns or workflows of its own."""

_FILES = (".jsonl", ".parquet")
TASKS = ("explorer.tasks", "explorer.task_sets", "explorer.agent.environment")
"""The keys of which one names the tasks."""


def are_chosen(given: Given) -> bool:
    """Return whether the user names tasks beside the file, or an environment, which has its own."""
    return any(key in given.chosen for key in TASKS)


def files_of(value: Any) -> list[str]:
    """Return the files that a value names; none if one of them is no JSONL or Parquet file of this host."""
    files = [value] if isinstance(value, str) else value
    is_known = isinstance(files, list) and all(map(_is_file, files))
    return list(files) if is_known else []


def _is_file(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(_FILES) and "://" not in name


def file_sets(files: Sequence[str], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a set of tasks for each file. Each has a name of its own.

    Args:
        files: Their paths.
        columns: `prompt_key` and `answer_key`, where they are given.
    """
    stems = [os.path.splitext(os.path.basename(file))[0] for file in files]
    if len(set(stems)) < len(stems):
        folders = [os.path.basename(os.path.dirname(file)) for file in files]
        stems = [f"{folder}-{stem}".lstrip("-") for folder, stem in zip(folders, stems, strict=True)]
    twice = {name for name, count in Counter(stems).items() if count > 1}
    names = [f"{name}-{place}" if name in twice else name for place, name in enumerate(stems, 1)]
    return [{"source": file, "name": name, **columns} for file, name in zip(files, names, strict=True)]


def data_set(source: str, **keys: Any) -> dict[str, Any]:
    """Return the set of tasks of a data set, as `datasets.load_dataset` finds it.

    Args:
        source: A name on the hub, or a directory.
        **keys: Further keys of the set; those that are empty are left out.
    """
    return {"source": f"datasets:{source}", **{key: value for key, value in keys.items() if value}}
