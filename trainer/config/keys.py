"""All keys of the trainer's file by their dotted names."""

from collections.abc import Mapping

from syncd.jobfile.keys import Key, Keys
from trainer.config.model import JobConfig

KEYS = Keys(JobConfig, ("job.dir", "job.state_dir", "model.path", "data.sft_path", "sync.memory_dir"))
"""The keys of the file, and those of them that name a file or directory."""


def keys() -> Mapping[str, Key]:
    """Return all keys, in the order of the model."""
    return KEYS.all


def tables() -> Mapping[str, str]:
    """Return the dotted names of all tables of known keys with what they are about."""
    return KEYS.tables
