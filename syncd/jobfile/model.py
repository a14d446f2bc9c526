"""The whole file of a job: one model for trainer, explorers and daemon, its keys, its schema, and itself as text.

Each program reads all tables, so whichever comes first finds a wrong key of any other. Parts add their own tables.
"""

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema

from syncd.config import table_schema
from syncd.jobfile.explorer_sections import ExplorerSection
from syncd.jobfile.keys import Keys
from syncd.jobfile.sections import (
    DataSection,
    JobSection,
    ModelSection,
    Section,
    SyncSection,
    with_tables_of_parts,
)
from syncd.jobfile.trainer_sections import (
    AlgorithmSection,
    CriticSection,
    EngineSection,
    MonitorSection,
    SelectionSection,
    StageSection,
    TrainerSection,
)

DaemonTable = Annotated[dict[str, Any], WithJsonSchema(table_schema())]
"""The keys of [daemon] as they were given; `syncd.config` checks them, with pydantic and without."""


@with_tables_of_parts("")
class JobFile(Section):
    """The whole file."""

    job: JobSection
    """The run itself."""
    model: ModelSection
    """What is trained."""
    engine: EngineSection = EngineSection()
    """The training engine."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """What the policy learns from experiences."""
    critic: CriticSection = CriticSection()
    """The critic of PPO."""
    data: DataSection = DataSection()
    """Where samples come from."""
    sync: SyncSection = SyncSection()
    """How weights reach explorers."""
    trainer: TrainerSection = TrainerSection()
    """The training loop."""
    selection: SelectionSection = SelectionSection()
    """Which steps are best by a figure."""
    monitor: MonitorSection = MonitorSection()
    """Where metrics go."""
    explorer: ExplorerSection = ExplorerSection()
    """What `explorer run` reads."""
    daemon: DaemonTable = Field(default_factory=dict)
    """What `syncd watch` reads, times in seconds; keep_full is trainer.max_checkpoints_to_keep unless given."""
    stages: tuple[StageSection, ...] = Field(default=(), strict=False)
    """What `trainer stages` runs one after the other."""

    @property
    def directory(self) -> str:
        """Return the directory of the file, to which relative paths are relative."""
        return os.path.dirname(self.job.source)

    @property
    def explorer_groups(self) -> int:
        """Return the groups of a batch that an explorer writes."""
        return self.explorer.groups or self.data.groups

    def with_source(self, path: str) -> Self:
        return self.with_values(job={"source": os.path.abspath(path)})

    def in_stage(self, name: str) -> Self:
        """Return the file with the directories of a stage, below those of all stages."""
        state_dir = f"{self.job.state_dir}/{name}" if self.job.state_dir else ""
        return self.with_values(job={"dir": f"{self.job.dir}/{name}", "state_dir": state_dir})

    def with_values(self, **tables: Mapping[str, Any]) -> Self:
        """Return the file with other values of some keys: `model={"path": ...}`, unchecked."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in tables.items()}
        return self.model_copy(update=changed)


KEYS = Keys(JobFile)  # the keys of the file


def json_schema() -> str:
    """Return the JSON Schema of the file; keys that later starts must agree with have `"fixed": true`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobFile.model_json_schema()}
    return json.dumps(schema, indent=2)


def plain(file: JobFile) -> dict[str, Any]:
    """Return the file as TOML has it: every key, `"none"` where nothing is set, and `daemon.keep_full`.

    Of explorers' keys only those that were given: an explorer tells them from its defaults.
    """
    table: dict[str, Any] = _plain(file.model_dump())
    table["explorer"] = _plain(file.explorer.model_dump(exclude_unset=True))
    if not table["stages"]:
        del table["stages"]
    table["daemon"] = {"keep_full": file.trainer.max_checkpoints_to_keep, **table["daemon"]}
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(below) for below in value]
    if isinstance(value, Enum):
        return value.value
    return "none" if value is None else value
