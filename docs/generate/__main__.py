"""Writes the reference: every page of docs/ that is made from the code.

    python docs/generate            # writes the pages (`make docs` begins with it)
    python docs/generate --check    # names those that are out of date, and exits with 1 (`make lint` ends with it)
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from reference import COMMAND, stale, write


def main(arguments: list[str]) -> int:
    """Write or check the pages, and return the exit code."""
    if arguments != ["--check"]:
        write()
        return 0
    old = stale()
    for page in old:
        print(f"docs/{page} is out of date: {COMMAND}")  # noqa: T201 - a script of the Makefile
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
