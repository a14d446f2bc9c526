"""The program `trainer`: the package `trainer` of this installation, whatever else has that name.

A file `trainer.py` in the working directory and another distribution called `trainer` would both be found before it,
the second one where syncd is installed from a checkout.

    python -P -m syncd.trainer_program MODULE [ARGUMENT ...]

runs a module of it as a program, such as a rank.
"""

import importlib
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from syncd.console import print_error
from syncd.errors import ConfigError

_HERE = Path(__file__).parents[1] / "trainer"
_NAMES = b'"TrainEngineWrapper": "trainer.engines.base"'
"""What the package's first file contains and that of no other distribution."""


class OwnTrainerFinder:
    """Finds `trainer` beside the package `syncd`; knows no other module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != _HERE.name:
            return None
        return spec_from_file_location(name, _HERE / "__init__.py", submodule_search_locations=[str(_HERE)])


def prefer_own_trainer() -> None:
    """Have `import trainer` find the package of this installation, for the rest of this process."""
    sys.meta_path.insert(0, OwnTrainerFinder())


def check_own_trainer() -> None:
    """Check that no other distribution has replaced the package's files."""
    path = _HERE / "__init__.py"
    if not path.is_file() or _NAMES not in path.read_bytes():
        hint = "pip uninstall trainer; pip install --force-reinstall --no-deps syncd"
        raise ConfigError("another distribution called trainer has replaced this file", path=path, hint=hint)


def main() -> NoReturn:
    prefer_own_trainer()
    try:
        check_own_trainer()
    except ConfigError as error:
        print_error(error)
        sys.exit(error.exit_code)
    sys.exit(importlib.import_module("trainer.cli.main").main())


if __name__ == "__main__":
    prefer_own_trainer()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
