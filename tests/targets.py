"""Which long targets of the Makefile are due: records each run, and compares it with what changed since.

python tests/targets.py run TARGET [--partial] -- COMMAND...    run, and record the result; a part is not recorded
python tests/targets.py due                                     print what is due; always exit 0
"""

import argparse
import ast
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

PLACE = Path(__file__).parent
RECORD = "targets.json"


def main(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("due")
    run = verbs.add_parser("run")
    run.add_argument("target", choices=paths_of(PLACE))
    run.add_argument("--partial", action="store_true")
    run.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.verb == "due":
        for line in due(PLACE):
            print(line)
        return 0
    started = git(PLACE, "rev-parse", "HEAD")
    changed = changes(PLACE, "HEAD", paths_of(PLACE)[options.target])
    code = subprocess.run(options.command, check=False).returncode
    if started and not options.partial:
        record(PLACE, options.target, started, "passed" if code == 0 else "failed", dirty=bool(changed))
    return code


def paths_of(place: Path) -> dict[str, list[str]]:
    """Return what each target tests."""
    targets = tomllib.loads((place / "targets.toml").read_text())
    return {name: target["paths"] for name, target in targets.items()}


def record(place: Path, target: str, commit: str, result: str, *, dirty: bool) -> None:
    """Write when, on which commit and with which result a target ran; `dirty`: with changes that are in no commit."""
    runs = recorded(place)
    runs[target] = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "result": result, "dirty": dirty}
    (place / RECORD).write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n")


def recorded(place: Path) -> dict[str, dict[str, str | bool]]:
    """Return the last run of each target."""
    try:
        return dict(json.loads((place / RECORD).read_text()))
    except FileNotFoundError:
        return {}


def due(place: Path) -> list[str]:
    """Return a line for each target that should run, none outside of a repository."""
    if not git(place, "rev-parse", "HEAD"):
        return []
    runs = recorded(place)
    reasons = {name: _reason(place, runs.get(name), paths) for name, paths in paths_of(place).items()}
    return [f"due: make {name}: {why}" for name, why in reasons.items() if why]


def _reason(place: Path, run: dict[str, str | bool] | None, paths: list[str]) -> str:
    if run is None:
        return "no run is recorded"
    when = f"on {run['date']}"
    if run["result"] != "passed":
        return f"it failed {when}"
    if run["dirty"]:
        return f"it ran {when} with changes that were not committed"
    changed = changes(place, str(run["commit"]), paths)
    if changed is None:
        return f"its commit of {when.removeprefix('on ')} is not in this repository"
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0]}{more} changed since it passed {when}" if changed else ""


def changes(place: Path, commit: str, paths: list[str]) -> list[str] | None:
    """Return which files differ from a commit, new ones included; None if there is no such commit.

    A module of which only comments and docstrings differ does not count.
    """
    tracked = git(place, "diff", "--name-only", commit, "--", *paths)
    if tracked is None:
        return None
    new = git(place, "ls-files", "--others", "--exclude-standard", "--", *paths)
    top = git(place, "rev-parse", "--show-toplevel")
    names = [name for name in tracked.splitlines() if not _is_same_code(Path(f"{top}/{name}"), commit, name)]
    return [*names, *(new or "").splitlines()]


def _is_same_code(file: Path, commit: str, name: str) -> bool:
    if file.suffix != ".py" or not file.exists():
        return False
    before = git(file.parent, "show", f"{commit}:{name}")
    try:
        return before is not None and _code(before) == _code(file.read_text())
    except SyntaxError:
        return False


def _code(text: str) -> str:
    """Return what a module's code parses to, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [each for each in statements if not _is_docstring(each)])
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def git(place: Path, *arguments: str) -> str | None:
    """Return what git prints in the repository of a directory, None if it fails."""
    try:
        top = subprocess.run(
            ["git", "-C", str(place), "rev-parse", "--show-toplevel"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        done = subprocess.run(["git", "-C", top, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
