"""Tasks that reasoning_gym generates, each when it is taken."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from explorer_hooks.tasks.task import Task, plain
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.problems import nearest
from syncd.jobfile.task_sets import TaskSetSection
from syncd.protocol.digest import hasher

GENERATOR = "reasoning_gym"  # the field of a task that says how it was generated; its scoring reads that

_SIZE = 1000
_NAMES = 'python -c "import reasoning_gym.factory as f; print(*sorted(f.DATASETS))"'


@dataclass(frozen=True)
class GymTasks:
    generator: str
    seed: int  # the seed of the tasks
    size: int  # how many there are
    options: Mapping[str, Any]  # the generator's settings

    @cached_property
    def data(self) -> Any:
        library, path = _library(), f"{GENERATOR}:{self.generator}"
        if self.generator not in library.factory.DATASETS:
            hint = nearest(self.generator, library.factory.DATASETS) or _NAMES
            raise ConfigError(f"reasoning_gym has no generator {self.generator}", path=path, hint=hint)
        try:
            return library.create_dataset(self.generator, seed=self.seed, size=self.size, **self.options)
        except (AssertionError, TypeError, ValueError) as error:
            fields = sorted(
                set(library.factory.DATASETS[self.generator][1].__dataclass_fields__) - {"seed", "size"}
            )
            hint = f"options has some of: {', '.join(fields)}"
            raise ConfigError(
                f"the options do not fit the generator: {error}", path=path, hint=hint
            ) from error

    @property
    def digest(self) -> str:
        made = hasher()
        release = getattr(_library(), "__version__", "")
        identity = [self.generator, release, self.seed, self.size, self.options]
        made.update(json.dumps(identity, sort_keys=True, default=str).encode())
        return str(made.hexdigest())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Task:
        try:
            entry = self.data[index]
        except Exception as error:
            text = f"the generator cannot make task {index}: {type(error).__name__}: {error}"
            hint = "another seed, or other options"
            raise ConfigError(text, path=f"{GENERATOR}:{self.generator}", hint=hint) from error
        made = {"generator": self.generator, "seed": self.seed, "size": self.size, "index": index}
        info = {GENERATOR: {**made, "options": dict(self.options)}, **plain(entry["metadata"])}
        return Task(f"{self.generator}-{index}", entry["question"], entry["answer"], info)


def open_gym(generator: str, section: TaskSetSection) -> GymTasks:
    made = GymTasks(generator, section.seed, section.size or _SIZE, section.options)
    _ = made.data  # what is wrong shows at the start
    return made


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about packages that it needs
            import reasoning_gym  # noqa: PLC0415 - seconds, and not everybody has it
    except ImportError as error:
        hint = install_command("tasks")
        raise ConfigError("tasks of reasoning_gym need it", path=GENERATOR, hint=hint) from error
    return reasoning_gym
