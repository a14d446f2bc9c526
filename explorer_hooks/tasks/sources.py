"""Opens the tasks that a file names: each source by its kind, then filters, names and weights."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from explorer_hooks.tasks.files import PARQUET, read_jsonl, read_parquet
from explorer_hooks.tasks.gym import GENERATOR, open_gym
from explorer_hooks.tasks.hugging_face import read_data_set
from explorer_hooks.tasks.order import NamedSet, Tasks
from explorer_hooks.tasks.task import Task, TaskSet
from syncd.errors import ConfigError
from syncd.experience.model import MAX_NAME
from syncd.jobfile.task_sets import HUGGING_FACE, SET, TaskSetSection
from syncd.protocol.digest import hasher

_ANSWER = TaskSetSection.model_fields["answer_key"].default
_SHOWN = 40  # characters of an id
_OF_ROWS = frozenset({"prompt_key", "answer_key", "id_key"})
_OF_DATA_SETS = frozenset({"split", "subset"})
_OF_GENERATORS = frozenset({"size", "seed", "options"})

_LOG = structlog.get_logger()


def open_tasks(sections: Sequence[TaskSetSection], directory: str = "") -> Tasks:
    """Return the tasks of sets, read and checked; relative paths start at `directory`, or the working directory."""
    names = _names(sections)
    _check_weights(sections)
    opened = [_opened(section, name, directory) for section, name in zip(sections, names, strict=True)]
    for section, tasks in zip(sections, opened, strict=True) if len(sections) > 1 else ():
        _check_ids(tasks, section)
    weights = [section.weight or len(tasks) for section, tasks in zip(sections, opened, strict=True)]
    return Tasks(tuple(map(NamedSet, names, opened, weights)))


def _names(sections: Sequence[TaskSetSection]) -> list[str]:
    names = [section.shown_name for section in sections]
    if parted := next((name for name in names if "/" in name), ""):
        text = f'a set of tasks is called "{parted}", and ids of tasks have a / behind the name of their set'
        raise ConfigError(text, hint=f'name = "{parted.replace("/", "-")}"')
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        hint = f'name = "{twice[0]}-2"'
        raise ConfigError(f'two sets of tasks are called "{twice[0]}"', hint=hint)
    return names


def _check_ids(tasks: TaskSet, section: TaskSetSection) -> None:
    """Raise if an id is too long for an experience once the name of its set is before it."""
    if section.source.startswith(f"{GENERATOR}:"):
        return  # ids of generated tasks are short, and each of them is made only when it is taken
    longest = max((tasks[at].id for at in range(len(tasks))), key=len)
    if len(f"{section.shown_name}/{longest}") > MAX_NAME:
        text = f"with the name of its set, the id {longest[:_SHOWN]}... has more than {MAX_NAME} characters"
        raise ConfigError(text, path=section.source, hint=f'name = "SHORTER", or a shorter {section.id_key}')


def _check_weights(sections: Sequence[TaskSetSection]) -> None:
    without = next((section.source for section in sections if section.weight is None), "")
    if without and any(section.weight for section in sections):
        raise ConfigError(
            "other sets have a weight, and this one has none", path=without, hint="weight = 1.0"
        )


def _opened(section: TaskSetSection, name: str, directory: str) -> TaskSet:
    source = _read(section, directory)
    tasks: TaskSet = source
    if section.where or section.limit or section.makes_messages:
        tasks = ChosenTasks.of(source, section)
    if not len(tasks):
        left = "" if not len(source) else f" of {len(source)} that fits {section.where}"
        raise ConfigError(f"there is no task{left}", path=section.source)
    _check_answers(tasks, section)
    _LOG.info(
        "tasks_read",
        task_set=name,
        source=section.source,
        tasks=len(tasks),
        left_out=len(source) - len(tasks),
    )
    return tasks


def _check_answers(tasks: TaskSet, section: TaskSetSection) -> None:
    """Raise if a column of answers was named, and no task has one: every reward would be 0."""
    if section.answer_key == _ANSWER or any(tasks[at].answer is not None for at in range(len(tasks))):
        return
    names = sorted(_fields(tasks[0]).keys() - {"answer"})
    text = f'no task has an answer in the column "{section.answer_key}" of answer_key'
    raise ConfigError(text, path=section.source, hint=f"the first task has: {', '.join(names)}")


def _read(section: TaskSetSection, directory: str) -> TaskSet:
    scheme, colon, name = section.source.partition(":")
    if colon and scheme == GENERATOR:
        _refuse(section, _OF_ROWS | _OF_DATA_SETS, "generated")
        return open_gym(name, section)
    if colon and scheme == HUGGING_FACE:
        _refuse(section, _OF_GENERATORS, "read")
        return read_data_set(name, section)
    if section.source.startswith(SET):
        hint = f'explorer.evaluation.tasks = "{section.source}"'
        raise ConfigError("a held-out set is for evaluations alone", path=section.source, hint=hint)
    _refuse(section, _OF_GENERATORS, "read")
    path = os.path.join(directory, os.path.expandvars(os.path.expanduser(section.source)))
    if os.path.isdir(path):
        return read_data_set(path, section)
    _refuse(section, _OF_DATA_SETS, "read from a file")
    return read_parquet(path, section) if path.endswith(PARQUET) else read_jsonl(path, section)


def _refuse(section: TaskSetSection, keys: frozenset[str], how: str) -> None:
    for key in sorted(keys & section.model_fields_set):
        raise ConfigError(
            f"{key} has no effect on tasks that are {how}", path=section.source, hint=f"leave {key} out"
        )


@dataclass(frozen=True)
class ChosenTasks:
    """Some tasks of a set, or tasks with messages in place of text."""

    tasks: TaskSet  # the set
    places: Sequence[int]  # which of its tasks
    section: TaskSetSection  # how prompts become messages

    @classmethod
    def of(cls, tasks: TaskSet, section: TaskSetSection) -> "ChosenTasks":
        places: Sequence[int] = range(len(tasks))
        if section.where:
            places = [at for at in places if _fits(tasks[at], section.where)]
            if not places:
                _check_columns(tasks, section)
        return cls(tasks, places[: section.limit] if section.limit else places, section)

    @property
    def digest(self) -> str:
        made, section = hasher(), self.section
        chosen = list(self.places) if section.where else len(self.places)
        made.update(f"{self.tasks.digest}\n{chosen}\n{section.system!r}\n{section.makes_messages}".encode())
        return str(made.hexdigest())

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int, /) -> Task:
        task, section = self.tasks[self.places[index]], self.section
        if not section.makes_messages or not isinstance(task.prompt, str):
            return task
        system = [{"role": "system", "content": section.system}] if section.system else []
        return Task(task.id, [*system, {"role": "user", "content": task.prompt}], task.answer, task.info)


def _fits(task: Task, where: Mapping[str, Any]) -> bool:
    fields = _fields(task)
    return all(
        name in fields and fields[name] in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in where.items()
    )


def _fields(task: Task) -> dict[str, Any]:
    return {**task.info, "id": task.id, "answer": task.answer}


def _check_columns(tasks: TaskSet, section: TaskSetSection) -> None:
    columns = sorted({name for at in range(len(tasks)) for name in _fields(tasks[at])})
    for name in section.where:
        if name not in columns:
            hint = f"where names some of: {', '.join(columns)}"
            raise ConfigError(f'no task has the column "{name}" of where', path=section.source, hint=hint)
