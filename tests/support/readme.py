"""The commands of README.md and docs/getting-started.md, and bash that types them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

PAGES = (ROOT / "README.md", ROOT / "docs/getting-started.md")
PROGRAMS = ("syncd", "trainer", "explorer", "make")


def commands() -> Iterator[tuple[str, bool, str]]:
    """Yield each command of the blocks: its section, whether it is in the first block of that, and itself."""
    for page in PAGES:
        for part in page.read_text().split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            blocks = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
            for number, block in enumerate(blocks):
                for line in block.splitlines():
                    yield f"{page.name}#{heading}", number == 0, re.sub(r"  +#.*", "", line.strip())


def table_commands() -> list[str]:
    """Return the commands in the first columns of the tables."""
    cells = [cell for page in PAGES for cell in re.findall(r"(?m)^\| (.*?) \|", page.read_text())]
    found = [command for cell in cells for command in re.findall(r"`([^`]+)`", cell)]
    return [command for command in found if command.split()[0] in PROGRAMS]


def line_of(start: str) -> str:
    """Return the command that begins in a way."""
    return next(command for _, _, command in commands() if command.startswith(start))


def typed(line: str, place: Path, **more: str) -> str:
    """Type a line in bash with the programs of this environment; return what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"PATH": path, "no_proxy": "*", **more}, cwd=place, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
