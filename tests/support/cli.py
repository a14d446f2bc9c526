"""The command line in this process, and as a process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from support.paths import ROOT
from syncd.cli.main import run, syncd

LONG = 60.0
"""A bound that only a failing test reaches."""

VERBS = tuple(verb for verb in syncd.verbs if verb not in {"follow", "probe"})
"""The verbs of the package `syncd` and its parts."""


@dataclass(frozen=True)
class Result:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Return its one JSON document."""
        return json.loads(self.out)


class Shell:
    """Runs command lines in this process; `python -m syncd` is the same, one start-up slower."""

    def __init__(self, capsys) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> Result:
        self._capsys.readouterr()
        try:
            code = run([str(argument) for argument in args])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)


def command(*args: object) -> list[str]:
    """Return what starts a command line as a process."""
    return [sys.executable, "-m", "syncd", *(str(argument) for argument in args)]


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which this checkout is imported, and nothing of ours is set."""
    kept = {key: value for key, value in os.environ.items() if "SYNCD" not in key}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def modules_loaded(*args: object) -> list[str]:
    """Return the modules that a command line imports in a process of its own, those of start-up included."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command(*args)[1:]],
        capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [line.rpartition("|")[2].strip() for line in lines[1:]]


def spawn(*args: object, **more: Any) -> subprocess.Popen[str]:
    """Start a command line with pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*args), stdout=pipe, stderr=pipe, text=True, env=environment(), **more)
