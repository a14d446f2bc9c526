"""The configuration as text: TOML, JSON Schema, and the documentation of all keys."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import tomli_w

from syncd.jobfile import text
from trainer.config.keys import KEYS
from trainer.config.model import JobConfig

_KEEP_FULL = "keep_full"


def plain(config: JobConfig) -> dict[str, Any]:
    """Return the configuration as TOML has it: every key, `"none"` where nothing is set, and `daemon.keep_full`."""
    table: dict[str, Any] = _plain(config.model_dump())
    if not table["stages"]:
        del table["stages"]
    table["daemon"] = {_KEEP_FULL: config.trainer.max_checkpoints_to_keep, **table["daemon"]}
    return table


def to_toml(config: JobConfig) -> str:
    """Return the configuration as TOML, with all keys; it reads as the same configuration."""
    return tomli_w.dumps(plain(config))


def json_schema() -> str:
    """Return the JSON Schema of the file; keys that later starts must agree with have `"fixed": true`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobConfig.model_json_schema()}
    return json.dumps(schema, indent=2)


def documentation() -> str:
    """Return the last part of docs/configuration.md, in Markdown: every key of each table."""
    return text.documentation(KEYS)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(below) for below in value]
    if isinstance(value, Enum):
        return value.value
    return "none" if value is None else value
