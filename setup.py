"""What setup.cfg cannot say: an index shows README.md, so its links must be addresses of this release's files."""

import re
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from syncd.errors import DOCS  # noqa: E402 - found by the line above

LINK = re.compile(r"\]\((?!\w+:|#)")
"""The beginning of a relative link."""

setup(long_description=LINK.sub(f"]({DOCS.removesuffix('docs')}", (ROOT / "README.md").read_text()))
