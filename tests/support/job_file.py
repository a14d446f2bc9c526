"""Job files of tests: each test names what its own has beyond the least."""

from pathlib import Path
from typing import Any

import tomli_w

LEAST = '[job]\ndir = "job"\n[model]\npath = "model"\n'
"""The text of the least one, for tests of what TOML says."""


def job_of(**tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a job: those of the least one, with keys that are added to them or replaced in them."""
    return _merged({"job": {"dir": "job"}, "model": {"path": "model"}}, tables)


def tiny_job(job: object, **tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a job in a directory that trains the tiny engine, with keys added or replaced."""
    tiny = job_of(
        job={"dir": str(job)},
        model={"path": "/nowhere"},
        engine={"name": "tests.tiny"},
        algorithm={"optimizer": {"lr": 0.01}},
        data={"groups": 2, "group_size": 2},
    )
    return _merged(tiny, tables)


def _merged(document: dict[str, Any], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return document | {name: document.get(name, {}) | keys for name, keys in tables.items()}


def write_job(path: object, document: dict[str, Any]) -> str:
    """Write a job's tables as the TOML file that trainer, explorer and daemon read; return its path."""
    Path(str(path)).write_text(tomli_w.dumps(document), encoding="utf-8")
    return str(path)
