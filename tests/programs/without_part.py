"""Takes a part out of a copy of the tree, and has lint and fast tests of the rest pass.

    python tests/programs/without_part.py PART [--keep] [PYTEST ARGUMENT ...]

What goes: the folders of the part's name, its tests, its lines of setup.cfg, and the benchmarks, examples and tests
outside of tests/parts that import it; those are printed. Pages are not compared: they describe the whole tree.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("syncd", "trainer", "explorer_hooks")
PARTS = sorted(path.name for path in (ROOT / "tests" / "parts").iterdir() if any(path.glob("test_*.py")))

EXTRAS = {
    "agents": ("gateway", "verifiers"),
    "megatron": ("megatron",),
    "mirror": ("mirror",),
    "tinker": ("tinker",),
    "verl_legacy": ("verl-legacy",),
}
"""The extras of setup.cfg that only one part needs."""

UNIT = (
    "completeness", "daemon_config", "delta_table", "documents", "extras", "manifest", "marker",
    "plan", "presence", "problem_groups", "receipt", "recent_versions", "rendezvous", "request", "retention",
    "rhythm", "safetensors", "sync_policy", "tensor_payload", "version", "views",
)  # fmt: skip
FAST = (
    *(f"tests/unit/test_{name}.py" for name in UNIT),
    "tests/trainer/test_config_load.py",
    "tests/trainer/test_next_action.py",
    "tests/trainer/test_sampling.py",
    "tests/explorer/test_explorer_config.py",
    "tests/explorer/test_follow_policy.py",
    "tests/explorer/test_hook_finding.py",
    "tests/integration/test_cli_main.py",
)
"""The tests that run unless others are named: decisions as pure functions, documents, the job file, command lines."""

PAGES = (
    "test_architecture_page", "test_charts", "test_docs_commands", "test_docs_references", "test_drawings",
    "test_due_targets",
    "test_faults_are_tested", "test_figure_names", "test_links_to_docs", "test_monitoring_files", "test_parts",
    "test_site", "test_structure", "test_workflows",
)  # fmt: skip
"""Tests of pages and of the tree as a whole, which are left out."""


def main(arguments: list[str]) -> int:
    """Run one command line, and return 0 if the rest passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--keep", action="store_true", help="keep the copy")
    options, tests = parser.parse_known_args(arguments)
    copy = Path(tempfile.mkdtemp(prefix=f"without-{options.part}-"))
    try:
        take_out(copy, options.part)
        return next((code for command in commands(tests) if (code := run(copy, command))), 0)
    finally:
        if options.keep:
            print(copy)
        else:
            shutil.rmtree(copy)


def take_out(copy: Path, part: str) -> None:
    """Fill a directory with the tree without a part."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    gone = tuple(f"{top}/parts/{part}/" for top in (*PACKAGES, "tests"))
    for name in filter(None, listed):
        if not name.startswith(gone) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    config = copy / "setup.cfg"
    config.write_text("".join(lines_without(config.read_text().splitlines(keepends=True), part)))
    for path in importers(copy, part):
        print(f"left out: {path.relative_to(copy)}")
        path.unlink()
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache", symlinks=True)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"], cwd=copy, env=environment(copy), check=True
    )


def lines_without(lines: list[str], part: str) -> Iterator[str]:
    """Yield the lines of setup.cfg without the part's: those that name its modules, files or extras.

    A section of a module of the part goes whole, and so does an import contract whose modules are all the part's.
    """
    named = re.compile(rf"\b(?:{'|'.join(PACKAGES)})\.parts\.{part}\b|^\s+parts/{part}/")
    extras = EXTRAS.get(part, ())
    for section in sections(lines):
        if named.search(section[0]):
            continue
        kept = [line for line in section if not named.search(line)]
        if section[0].startswith("[importlinter:contract") and "source_modules =\n" in kept:
            after = kept[kept.index("source_modules =\n") + 1]
            if not after.startswith(" "):
                continue
        if section[0].startswith("[options.extras_require]"):
            kept = list(without_extras(kept, extras))
        yield from kept


def sections(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each section, from its heading on."""
    starts = [number for number, line in enumerate(lines) if line.startswith("[")]
    yield from (lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True))


def without_extras(lines: Iterable[str], extras: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the extras but some, and without what other extras take from those."""
    is_gone = False
    for line in lines:
        if not line.startswith((" ", "#", "\n")):
            is_gone = line.partition("=")[0].strip() in extras
        if not is_gone and line.strip() not in {f"%({extra})s" for extra in extras}:
            yield line


def importers(copy: Path, part: str) -> list[Path]:
    """Return the files outside of the packages that import a module of the part, or a file that does."""
    files = [path for top in ("tests", "benchmarks", "examples") for path in (copy / top).rglob("*.py")]
    imported = {path: set(imports(path)) for path in files}
    gone = {f"{top}.parts.{part}" for top in PACKAGES}
    found: set[Path] = set()
    while more := {path for path in imported.keys() - found if is_gone(imported[path], gone)}:
        found |= more
        gone |= {module_of(path) for path in more}
    return sorted(found)


def is_gone(names: set[str], gone: set[str]) -> bool:
    """Return whether one of some modules is gone, or is in a package that is."""
    return any(name == one or name.startswith(f"{one}.") for name in names for one in gone)


def module_of(path: Path) -> str:
    """Return how tests and benchmarks import a file: helpers by their package, others by their name."""
    return f"support.{path.stem}" if path.parent.name == "support" else path.stem


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def commands(tests: list[str]) -> Iterator[list[str]]:
    """Yield what must pass in the copy."""
    python = sys.executable
    scripts = Path(python).parent
    yield [f"{scripts}/ruff", "check", "--quiet", "."]
    yield [f"{scripts}/ruff", "format", "--check", "--quiet", "."]
    yield [f"{scripts}/lint-imports"]
    yield [python, "-m", "mypy"]
    left_out = [f"--ignore-glob=*/{name}.py" for name in PAGES]
    marks = "not slow and not sweep and not beds"
    yield [python, "-m", "pytest", "-q", "-n", "2", "-m", marks, *left_out, *(tests or FAST)]


def run(copy: Path, command: list[str]) -> int:
    """Run a command in the copy, and return its exit code."""
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=copy, env=environment(copy), check=False).returncode


def environment(copy: Path) -> dict[str, str]:
    """Return an environment in which Python finds the copy, and what it registers, before what is installed."""
    return {**os.environ, "PYTHONPATH": str(copy)}


def git(*arguments: str) -> str:
    """Return what git prints of this tree."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
