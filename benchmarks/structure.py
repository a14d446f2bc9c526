"""What the source tree looks like: files, code lines, shared class names, circles between folders, small modules.

    python benchmarks/structure.py [--trace] [--list] [--json out/structure.json]

Everything is read from imports and definitions. The core is what lies outside of `PACKAGE/parts/`. Figures of the
same features leave out the files that hold nothing but features that tree 658d26ae lacks (`LATER`); what these
features add to other files still counts. `--trace` also runs one save and one load of a small model and counts the
product's files whose functions they enter: a weight's way from the trainer's parameters to an engine's.
A line of code is one that is neither blank, nor a comment, nor part of a docstring. Files of data and of the page
(`DATA`) are counted by their lines that are neither blank nor a comment, so that code which becomes data is seen.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("syncd", "trainer", "explorer_hooks")
DATA = ("toml", "js", "html", "css")
SMALL = 70
LATER = {
    "hosts": (
        "syncd/parts/hosts/",
        "syncd/transports/files/piece_reader.py",
        "syncd/protocol/tile_table.py",
        "syncd/protocol/read_bytes.py",
    ),
    "rolling updates": (
        "syncd/parts/rolling/",
        "explorer_hooks/parts/rolling/",
        "explorer_hooks/follower/gate.py",
        "syncd/protocol/rolling.py",
        "syncd/daemon/parts.py",
    ),
    "mirrors": ("syncd/parts/mirror/", "syncd/protocol/mirror_report.py", "syncd/experience/rejected.py"),
    "early copies": ("syncd/parts/early/", "syncd/protocol/write_progress.py"),
    "exams, proof by change": (
        "explorer_hooks/parts/exam/",
        "explorer_hooks/proof/changes.py",
        "explorer_hooks/proof/calibrations.py",
    ),
    "trust in code": (
        "syncd/jobfile/code_trust.py",
        "syncd/protocol/path_trust.py",
        "trainer/safe_unpickle.py",
    ),
    "responses API": ("explorer_hooks/parts/agents/responses_api.py",),
    "schedules": ("trainer/config/schedule.py",),
}
"""The features that tree 658d26ae lacks, and how the paths of their own files begin."""

_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One file of the product.

    Args:
        name: Its dotted name.
        path: Where it lies, from the root of the repository.
        lines: Lines of the file.
        code: Lines of code.
        docstrings: Lines of docstrings.
        tree: What it parses to.
    """

    name: str
    path: str
    lines: int
    code: int
    docstrings: int
    tree: ast.Module

    @property
    def is_core(self) -> bool:
        """Whether it lies outside of the parts that can be taken out."""
        return self.part == ""

    @property
    def part(self) -> str:
        """The part that it belongs to, empty for the core."""
        folders = self.path.split("/")
        return folders[2].removesuffix(".py") if folders[1] == "parts" else ""

    @property
    def is_later(self) -> bool:
        """Whether it holds nothing but features that tree 658d26ae lacks."""
        return self.later_feature != ""

    @property
    def later_feature(self) -> str:
        """The feature of `LATER` that it belongs to, empty for none."""
        return next((name for name, starts in LATER.items() if self.path.startswith(starts)), "")


def main() -> None:
    """Print the figures, and keep them as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="also trace one save and one load")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    sources = read(ROOT, PACKAGES)
    figures = measure(sources) | {f"lines of {kind} in the product": data_lines(ROOT, kind) for kind in DATA}
    if options.trace:
        import structure_trace  # noqa: PLC0415 - needs torch

        figures |= structure_trace.measure()
    for name, value in figures.items():
        print(f"{name:44}{len(value) if isinstance(value, list | dict) else value:>10}")
        if options.list and isinstance(value, list | dict):
            for item in value.items() if isinstance(value, dict) else value:
                print("   ", item if isinstance(item, str) else f"{item[0]}: {item[1]}")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


def read(root: Path, packages: Iterable[str]) -> dict[str, Source]:
    """Return the product's files by their dotted names."""
    sources = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            parts = list(path.relative_to(root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            tree = ast.parse(text)
            lines = len(text.splitlines())
            code, docstrings = code_lines(text, tree), len(set(_docstring_lines(tree)))
            sources[name] = Source(name, str(path.relative_to(root)), lines, code, docstrings, tree)
    return sources


def data_lines(root: Path, kind: str) -> int:
    """Return the lines of the product's files of a kind that are neither blank nor a comment of one line."""
    comments = ("#",) if kind == "toml" else ("//", "/*", "<!--")
    return sum(
        bool(line.strip()) and not line.strip().startswith(comments)
        for package in PACKAGES
        for path in (root / package).rglob(f"*.{kind}")
        for line in path.read_text().splitlines()
    )


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines that hold code: no blank line, no comment, no docstring."""
    skip = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skip
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(held - set(_docstring_lines(tree)))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def measure(sources: dict[str, Source]) -> dict[str, object]:
    """Return the figures of a source tree by what they say."""
    graph = {name: set(imports(source, sources)) for name, source in sources.items()}
    importers = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    single = {
        source.path: next(iter(importers[name]))
        for name, source in sources.items()
        if len(importers[name]) == 1 and source.code and not source.path.endswith("__init__.py")
    }
    functions = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for source in sources.values()
        for node in _functions(source)
    )
    same = [source for source in sources.values() if not source.is_later]
    return {
        **sizes(sources.values()),
        "lines": sum(source.lines for source in sources.values()),
        "parts, by code lines": code_of(sources.values(), lambda source: source.part),
        "later features, by code lines": code_of(sources.values(), lambda source: source.later_feature),
        **{f"same features: {name}": size for name, size in sizes(same).items()},
        "median lines of a function": functions[len(functions) // 2] if functions else 0,
        "90th percentile of a function": functions[len(functions) * 9 // 10] if functions else 0,
        "class names used more than once": shared_classes(sources),
        "modules with one importer": len(single),
        f"modules with one importer under {SMALL} lines": {
            path: by for path, by in single.items() if _by_path(sources)[path].lines < SMALL
        },
        "circles between folders": [" <-> ".join(group) for group in circles(graph)],
    }


def sizes(sources: Iterable[Source]) -> dict[str, object]:
    """Return how much there is of some files."""
    counted = list(sources)
    return {
        "product files": len(counted),
        "code lines": sum(source.code for source in counted),
        "code lines of the core": sum(source.code for source in counted if source.is_core),
        "lines of docstrings": sum(source.docstrings for source in counted),
        "files above 300 lines": {source.path: source.lines for source in counted if source.lines > 300},
    }


def code_of(sources: Iterable[Source], group: Callable[[Source], str]) -> dict[str, int]:
    """Return the code lines of each group of files but the one without a name."""
    lines: dict[str, int] = defaultdict(int)
    for source in sources:
        if group(source) and source.code:
            lines[group(source)] += source.code
    return dict(sorted(lines.items()))


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(source.tree) if isinstance(node, _DEFINES))


def _by_path(sources: dict[str, Source]) -> dict[str, Source]:
    return {source.path: source for source in sources.values()}


def imports(source: Source, sources: dict[str, Source]) -> Iterator[str]:
    """Yield the dotted names of the product's modules that a module imports, anywhere in it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in sources)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in sources:
                    yield inner
                elif node.module in sources:
                    yield node.module


def shared_classes(sources: dict[str, Source]) -> dict[str, list[str]]:
    """Return class names that several modules define, and where."""
    found = defaultdict(list)
    for source in sources.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of folders that import each other in a circle, of whatever length.

    A module at the root of a package counts for itself, as its own layer (setup.cfg orders them). `__main__` modules
    do not count: they start a command line, and nothing imports them.
    """
    between: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        if not name.endswith("__main__"):
            between[_folder(name, graph)] |= {_folder(target, graph) for target in targets}
    reached = {folder: _reached(folder, between) for folder in between}
    groups = {
        tuple(sorted(other for other in reached[folder] if folder in reached.get(other, ())))
        for folder in between
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def _folder(name: str, graph: Iterable[str]) -> str:
    """Return the folder of a module; a package is its own, and so is a module at the root of the product."""
    is_package = any(other.startswith(f"{name}.") for other in graph)
    return name if is_package or name.count(".") < 2 else name.rpartition(".")[0]


def _reached(folder: str, between: dict[str, set[str]]) -> set[str]:
    """Return the folders that a folder imports, directly or not, and itself."""
    found, todo = {folder}, [folder]
    while todo:
        new = between.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


if __name__ == "__main__":
    main()
