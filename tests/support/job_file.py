"""The file of a job that trains the tiny engine; each test names what it changes."""

from pathlib import Path
from typing import Any

import tomli_w


def tiny_job(job: object, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of such a job.

    Args:
        job: Its directory.
        **sections: Keys that are added to a table, or replaced in it.
    """
    document: dict[str, Any] = {
        "job": {"dir": str(job)},
        "model": {"path": "/nowhere"},
        "engine": {"name": "tests.tiny"},
        "algorithm": {"optimizer": {"lr": 0.01}},
        "data": {"groups": 2, "group_size": 2},
    }
    for name, keys in sections.items():
        document[name] = document.get(name, {}) | keys
    return document


def write_job(path: object, document: dict[str, Any]) -> None:
    """Write a job's tables as the TOML file that trainer, explorer and daemon read."""
    Path(str(path)).write_text(tomli_w.dumps(document), encoding="utf-8")
