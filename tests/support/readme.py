"""The commands of README.md and the tutorials, and bash that types them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

PAGES = (ROOT / "README.md", *(ROOT / f"docs/tutorial-{name}.md" for name in ("vllm", "slurm", "agent")))


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command of the pages: its section, and itself."""
    for page in PAGES:
        for part in page.read_text().split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            for line in shell_lines(text):
                yield f"{page.name}#{heading}", line


def section(page: Path, heading: str) -> str:
    """Return the text of a section."""
    return page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def shell_lines(text: str) -> list[str]:
    """Return the commands of the indented blocks of a text, those of several lines as one; no Python."""
    blocks = re.findall(r"(?:^ {4}\S.*\n(?: {4}.*\n)*)", re.sub(r"\\\n\s*", "", text), re.MULTILINE)
    kept = [
        block
        for block in blocks
        if not re.search(r"^ {4}(?:import|from|with|\w+ = \{|def) ", block, re.MULTILINE)
    ]
    return [
        re.sub(r"  +#.*", "", line.strip()) for block in kept for line in block.splitlines() if line.strip()
    ]


def line_of(start: str) -> str:
    """Return the command that begins in a way."""
    return next(command for _, command in commands() if command.startswith(start))


def typed(line: str, place: Path, limit: float = 280, **more: str) -> str:
    """Type a line in bash with the programs of this environment; return what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"PATH": path, "no_proxy": "*", **more}, cwd=place, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
