"""Writes the reference, every page of docs/ that is made from the code: `python docs/generate`.

`make docs` begins with it. With `--check` it names the pages that are out of date and exits with 1: `make lint`.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]


def main(arguments: list[str]) -> int:
    """Write or check the pages, and return the exit code."""
    from reference import COMMAND, stale, write  # noqa: PLC0415 - found once `sys.path` has this checkout

    if arguments != ["--check"]:
        write()
        return 0
    old = stale()
    for page in old:
        print(f"docs/{page} is out of date: {COMMAND}")  # noqa: T201 - a script of the Makefile
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
