"""Tasks of Hugging Face `datasets`: a directory, or the name of a data set of the hub or of its cache."""

import json
import os
from collections.abc import Iterator
from typing import Any

from explorer_hooks.tasks.task import Columns, ReadTasks, Task, plain, task_of
from syncd.errors import ConfigError, first_line
from syncd.extras import install_command
from syncd.jobfile.task_sets import TaskSetSection
from syncd.protocol.digest import hasher

_SPLIT = "train"
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


def read_data_set(source: str, section: TaskSetSection) -> ReadTasks:
    """Return all rows of a split as tasks; `source`: a directory of `save_to_disk` or with data files, or a name."""
    split = section.split or _SPLIT
    data, where = _opened(source, split, section.subset), f"{source}, split {split}"
    Columns.of(section).check(list(data.column_names), where)
    digest = hasher()
    made = tuple(_tasks(data, where, Columns.of(section), digest))
    return ReadTasks(str(digest.hexdigest()), made)


def _tasks(data: Any, where: str, columns: Columns, digest: Any) -> Iterator[Task]:
    for number, row in enumerate(data, 1):
        fields = plain(row)
        digest.update(json.dumps(fields, sort_keys=True).encode())
        yield task_of(fields, f"{where}, row {number}", f"row-{number}", columns)


def _opened(source: str, split: str, subset: str) -> Any:
    try:
        import datasets  # noqa: PLC0415 - seconds, and not everybody has it
    except ImportError as error:
        hint = install_command("tasks")
        raise ConfigError("tasks of a data set need datasets", path=source, hint=hint) from error
    datasets.disable_progress_bars()  # they would be drawn over the log
    try:
        if os.path.exists(f"{source}/{_SAVED_SPLITS}"):
            return datasets.load_from_disk(source)[split]
        if os.path.exists(f"{source}/{_SAVED}"):
            return _only_split(datasets.load_from_disk(source), split, source)
        return datasets.load_dataset(source, subset or None, split=split)
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(source, split, error) from error


def _only_split(data: Any, split: str, source: str) -> Any:
    """Return a data set that was saved without splits, or as one of them."""
    own = str(data.split or split)
    if own != split:
        raise ConfigError(f'the directory has the split "{own}"', path=source, hint=f'split = "{own}"')
    return data


def _unreadable(source: str, split: str, error: Exception) -> ConfigError:
    """Return the error for what `datasets` raises, which has no common class."""
    shown = first_line(error)
    what = f"is there no split {split}? {shown}" if isinstance(error, KeyError) else shown
    hint = None
    if not os.path.isdir(source):
        hint = f"where there is a network: hf download --repo-type dataset {source}"
    return ConfigError(f"datasets cannot read it: {what}", path=source, hint=hint)
