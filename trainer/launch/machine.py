"""How many ranks this machine starts, and the environment that C libraries read at start. Imports no torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_LISTING = 30.0


def count_ranks(nproc: int | Literal["auto"], device: str, environ: Mapping[str, str]) -> int:
    if nproc != "auto":
        return nproc
    return 1 if device == "cpu" else max(count_gpus(environ), 1)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA would show to a process with this environment; 0 if unknown."""
    installed = _listed_gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    named = [name.strip() for name in visible.split(",")]
    # CUDA ignores the first entry that names no GPU and all after it.
    valid = next((at for at, name in enumerate(named) if not name or name == "-1"), len(named))
    return min(valid, installed)


def settings(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a rank should start with, where the user has not set them.

    Threads of all ranks together fill the cores once. Copies of a few megabytes go around the processor's cache,
    so that a save blocks the loop for less time (`_TUNABLE`).
    """
    cores = len(os.sched_getaffinity(0))
    variables = {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(cores // nproc, 1))}
    tunables = environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE not in tunables:
        variables["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, f"{_TUNABLE}=0x80000"]))
    return variables


def _listed_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return _driver_gpus()
    try:
        listed = subprocess.run(  # noqa: S603 - found on the path, no arguments of others
            [program, "-L"], capture_output=True, text=True, errors="replace", check=True, timeout=_LISTING
        )
    except (OSError, subprocess.SubprocessError):
        return _driver_gpus()
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _driver_gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
