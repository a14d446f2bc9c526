"""Where this checkout, its tests and what counts as installed lie."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TINY_ENGINE = TESTS / "trainer" / "engines" / "installed"
"""Where the metadata of the tiny engine is: on `sys.path` it counts as installed."""

FAKE_HOOK = TESTS / "explorer" / "installed"
"""The same for the fake hook."""

PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS, TINY_ENGINE)))
"""What a program of the tests needs to import this checkout, its helpers and the tiny engine."""
