"""Skips a file whose tests need a package that is not installed, without importing the package.

Each worker collects every file: `pytest.importorskip("verl")` there costs each of them seconds.
"""

import importlib.util

import pytest


def need(name: str, reason: str) -> None:
    """Skip the file that calls this unless a package is installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {reason}", allow_module_level=True)
