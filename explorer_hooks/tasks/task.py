"""A task, and what every source of tasks provides."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from syncd.errors import ConfigError
from syncd.experience.model import MAX_NAME

if TYPE_CHECKING:
    from syncd.jobfile.task_sets import TaskSetSection

_SHOWN = 40
_MESSAGES = "messages"

Prompt = str | Sequence[Mapping[str, str]]
"""Text for the model, or messages from which the tokenizer's chat template makes text."""


@dataclass(frozen=True, slots=True)
class Task:
    id: str  # its name: its id in the source, or its line or row
    prompt: Prompt  # what the model is asked
    answer: Any  # its answer in the source, None if it has none
    info: Mapping[str, Any]  # all other fields of its row, as JSON has them

    @property
    def text(self) -> str:
        """Return the prompt as text: for messages, their contents."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)


class TaskSet(Protocol):
    """The tasks of one source; sets with one digest have the same tasks in the same order, in every process."""

    @property
    def digest(self) -> str:
        """Return the digest of the tasks."""

    def __len__(self) -> int:
        """Return how many there are, at least one."""

    def __getitem__(self, index: int, /) -> Task:
        """Return one of them."""


@dataclass(frozen=True, slots=True)
class ReadTasks:
    digest: str
    all: tuple[Task, ...]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int, /) -> Task:
        return self.all[index]


@dataclass(frozen=True, slots=True)
class Columns:
    prompt: str = "prompt"  # the prompt; `messages` is also accepted
    answer: str = "answer"
    id: str = "id"  # the task's name

    @classmethod
    def of(cls, section: "TaskSetSection") -> Self:
        return cls(section.prompt_key, section.answer_key, section.id_key)

    def check(self, names: Sequence[str], where: str) -> None:
        if self.prompt not in names and _MESSAGES not in names:
            raise ConfigError(
                f'there is no column "{self.prompt}" and none called "{_MESSAGES}"',
                path=where,
                hint=f'prompt_key = "{names[0] if names else "NAME"}", or another one of: {", ".join(names)}',
            )


def task_of(row: dict[str, Any], where: str, unnamed: str, columns: Columns) -> Task:
    """Return the task of a row of JSON, which is used up; `unnamed` is its name if it has no id."""
    prompt = row.pop(columns.prompt, None) or row.pop(_MESSAGES, None)
    name = row.pop(columns.id, None)
    _check_prompt(prompt, where, columns.prompt)
    named = str(name) if isinstance(name, str | int) and name != "" else unnamed
    if len(named) > MAX_NAME or not named.isprintable():
        raise ConfigError(f"id is not a text of 1 to {MAX_NAME} characters", path=where)
    return Task(named, prompt, row.pop(columns.answer, None), row)


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON has it: other values, such as dates, become text."""
    made: dict[str, Any] = from_json(json.dumps(row, default=str))
    return made


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text says; a number that JSON does not have, such as NaN, is null: no experience has it."""
    return json.loads(text, parse_constant=lambda _: None)


def _check_prompt(prompt: Any, where: str, key: str) -> None:
    is_messages = isinstance(prompt, list) and prompt and all(map(_is_message, prompt))
    if not is_messages and not (isinstance(prompt, str) and prompt):
        shown = json.dumps(prompt)[:_SHOWN]
        hint = f'"{key}": "text", or "{_MESSAGES}": [{{"role": "user", "content": "text"}}]'
        raise ConfigError(f"{key} = {shown} is neither text nor messages", path=where, hint=hint)
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key} has half a character, which no tokenizer takes", path=where) from None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )
