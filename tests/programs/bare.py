"""Runs a command line as `pip install syncd` alone leaves it: what the extras bring cannot be imported.

bare.py PROGRAM [ARGUMENT]...
"""

import importlib.abc
import sys
from importlib import import_module

PLAIN = {"click", "rich", "structlog", "watchdog", "xxhash", "pygments", "markdown_it", "mdurl"}
OURS = {"syncd": "syncd.cli.main", "trainer": "trainer.cli.main", "explorer": "explorer_hooks.cli.main"}


class Bare(importlib.abc.MetaPathFinder):
    """Finds nothing but the standard library, this package and what it always needs."""

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in {*PLAIN, "syncd", "trainer", "explorer_hooks", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Bare())
sys.argv = sys.argv[1:]
import_module(OURS[sys.argv[0]]).main()
