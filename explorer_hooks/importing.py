"""Things of one's own by import path: `package.module:attribute`."""

import importlib
import os
import sys
from operator import attrgetter
from typing import Any

from syncd.errors import ConfigError

FORM = "package.module:attribute"


def imported(path: str) -> Any:
    """Return what an import path names; the module itself where no attribute is named.

    What is installed or on PYTHONPATH comes first, then the current directory.

    Raises:
        ConfigError: There is no such module or attribute, or its import fails.
    """
    module_name, _, attribute = path.partition(":")
    if not all(
        part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")) if path and part
    ):
        raise ConfigError(f"not an import path: {path!r}", hint=f"write {FORM}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    try:
        return attrgetter(attribute)(module) if attribute else module
    except AttributeError:
        raise ConfigError(f"{module_name} has no {attribute}", hint=f"write {FORM}") from None
