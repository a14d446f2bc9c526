"""What the benchmarks share: a daemon, on which machine, how figures are shown, and where they are kept."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncd.protocol.mount import mount_of

Row = tuple[str, str, str, bool | None]
"""What was measured, its value, the target, and whether that was met; None: there is none."""


KEEP_NEWEST = ("--keep-last", "1", "--trash-grace", "0")
"""Options of `syncd watch` with which a step is removed as soon as nobody needs it."""


@contextmanager
def running_daemon(job: Path, *options: str) -> Iterator[None]:
    """Run `syncd watch` on a job until the end of the block."""
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--log-level", "error"]
    process = subprocess.Popen([*command, *options])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def scratch_directory(prefix: str, place: str | None) -> Iterator[Path]:
    """Give a directory of its own, in a place or else where temporary files are; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def run_with_stage(
    prefix: str,
    options: argparse.Namespace,
    measure: Callable[[Path, str, argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Measure in a directory of its own and with a stage, remove both, then show the figures and keep them.

    Args:
        prefix: How the name of the directory begins.
        options: `dir` and `stage`: where the two are made; `json`: where the figures are kept.
        measure: Returns the figures of a directory, a stage and the options.
        show: Prints them.
    """
    with (
        scratch_directory(prefix, options.dir) as scratch,
        scratch_directory("syncd-stage-", options.stage) as stage,
    ):
        figures = measure(scratch, str(stage), options)
    show(figures)
    keep(options.json, figures)


def machine(scratch: Path, **more: Any) -> dict[str, Any]:
    """Return what the figures depend on.

    Args:
        scratch: Where it was measured.
        **more: What this benchmark depends on besides.
    """
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **more,
        "file_system": mount_of(str(scratch)).type,
        "date": time.strftime("%Y-%m-%d"),
    }


def spread(values: list[float], digits: int) -> str:
    """Return median (least-most)."""
    low, middle, high = (f"{one:.{digits}f}" for one in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


def span(values: list[float]) -> str:
    """Return least-most."""
    return f"{min(values)}-{max(values)}"


def print_targets(rows: Iterable[Row], name_width: int, value_width: int) -> None:
    """Print each row with its verdict."""
    for name, value, target, met in rows:
        verdict = "" if met is None else "met" if met else "MISSED"
        print(f"{name:<{name_width}} {value:>{value_width}}  {target:<10} {verdict}".rstrip())


def keep(path: str, figures: dict[str, Any]) -> None:
    """Write figures as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(figures, indent=2) + "\n")
