"""The keys of a set of tasks."""

import os
from typing import Any

from pydantic import Field

from syncd.jobfile.sections import Above0, Count, NoneText, Positive, Section

HUGGING_FACE = "datasets"  # what begins the name of a data set, before a colon
SET = "set:"  # what begins the name of a held-out set of the file
SCHEMES = (HUGGING_FACE, "reasoning_gym", "set")  # what begins tasks that are no path, before a colon


class TaskSetSection(Section):
    """A set of tasks; one table for each, instead of `explorer.tasks`."""

    source: str
    """A JSONL or Parquet file; a directory or datasets:NAME, for Hugging Face `datasets`; reasoning_gym:NAME."""
    name: str = ""
    """What tasks, experiences and metrics call it; the last part of the source unless given. No slash."""
    weight: Above0 | NoneText = None
    """Its share of an epoch's tasks in relation to the other sets; with none, all tasks of all sets come once."""
    held_out: bool = False
    """Never taken for training: explorer.evaluation.tasks = "set:NAME" measures by it."""
    prompt_key: str = "prompt"
    """The column of the prompt, text or messages; `messages` is also accepted."""
    answer_key: str = "answer"
    """The column of the answer."""
    id_key: str = "id"
    """The column of the task's name; the number of its row unless there is one."""
    system: str = ""
    """A message of the system before a prompt that is text; the prompt is then a message of the user."""
    chat: bool = False
    """Make a prompt that is text a message of the user, for the model's chat template."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Only tasks whose columns have these values, or one of a list: { level = [1, 2], kind = "algebra" }."""
    limit: Count = 0
    """Tasks that are used, from the beginning of what `where` leaves; 0 for all."""
    split: str = ""
    """Directories, datasets: the split; train unless given."""
    subset: str = ""
    """Directories, datasets: the configuration of a data set that has several."""
    size: Positive | NoneText = None
    """reasoning_gym: tasks that are generated; 1000 unless given."""
    seed: Count = 0
    """reasoning_gym: the seed of the tasks."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: the generator's settings: { min_terms = 2, max_terms = 2 }."""

    @property
    def shown_name(self) -> str:
        """Return its name: the one given, or the last part of the source without its ending."""
        last = os.path.basename(self.source.rstrip("/")).rpartition(":")[2]
        return self.name or os.path.splitext(last)[0]

    @property
    def makes_messages(self) -> bool:
        """Return whether prompts that are text become messages."""
        return self.chat or bool(self.system)
