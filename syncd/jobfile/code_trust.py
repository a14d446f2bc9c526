"""Code that the file of a job names runs only if nobody but its user and root could have written the file.

A file that lies in a job may be anybody's who writes there: a member of its group, another trainer. Whoever starts a
program with such a file, by name or through the job, must not run what others have put into it. A file elsewhere that
the user names counts as the user's own. `--trust-job-file` says that the user knows what is in it.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from typing import Any

from syncd.errors import TROUBLESHOOTING, ConfigError, storage_errors
from syncd.jobfile.problems import shown
from syncd.jobfile.stages_file import STAGES
from syncd.protocol.layout import MARKER, STATE, TRACKER
from syncd.protocol.path_trust import WeakLevel, weak_level

OPTION = "--trust-job-file"

FUNCTION = "function"
"""What marks a key whose value names code only if it is `module:function`; keys marked otherwise do whenever set."""

KERNEL = "kernel"
"""The same for a key whose value names code only if it is `owner/name`, which transformers loads from the hub."""

_SEPARATORS = {FUNCTION: ":", KERNEL: "/"}

_SIGNS = (STATE, MARKER, TRACKER, STAGES)


def lies_in_job(path: str) -> bool:
    """Return whether a path, or what it leads to, is in a directory of a job or of stages, or is one."""
    above = {
        directory
        for name in (os.path.abspath(path), os.path.realpath(path))
        for directory in _and_parents(name)
    }
    return any(os.path.lexists(f"{directory}/{sign}") for directory in above for sign in _SIGNS)


def names_code(mark: str, value: Any) -> bool:
    """Return whether the value of a key with a mark makes a program run code."""
    if mark not in _SEPARATORS:
        return bool(value)
    names = value if isinstance(value, Mapping) else [value]
    return any(isinstance(name, str) and _SEPARATORS[mark] in name for name in names)


def require_own_file(
    path: str, status: os.stat_result, directory: str, key: str, value: Any, *, is_kept: bool
) -> None:
    """Refuse code that a file in a job names if another user could have written the file, or the module beside it.

    Args:
        status: What `os.fstat` said of it when it was read.
        is_kept: Whether a job was named, whose file it is; else it may not lie in one.
    """
    if not (is_kept or lies_in_job(path)):
        return
    with storage_errors(path):
        weak = weak_level(path, status)
        if weak is None and lies_in_job(directory):
            weak = weak_level(directory, gains=True)
    if weak:
        raise _refused(f"{key} = {shown(value)} runs code, and others could have changed", path, weak)


def require_own_model(path: str, *, runs_code: bool, recorded: bool = False) -> None:
    """Refuse to run code of a model that lies in a job, or that a job's record names, and others could have written.

    Args:
        runs_code: Whether code that comes with it would run.
        recorded: Whether `stages.json` of a job named the directory, not the user.
    """
    if not runs_code or not (recorded or lies_in_job(path)):
        return
    with storage_errors(path):
        modules = sorted(glob.glob(f"{glob.escape(path)}/*.py"))
        weak = weak_level(path, gains=True) or next(filter(None, map(weak_level, modules)), None)
    if weak:
        raise _refused(
            "model.trust_remote_code runs code of the model, and others could have changed", path, weak
        )


def _refused(what: str, path: str, weak: WeakLevel) -> ConfigError:
    hint = (
        f"{weak.mend}; or {OPTION}, if you know what is in it  "
        f"# {TROUBLESHOOTING}#others-could-have-changed-it"
    )
    return ConfigError(f"{what} it ({weak})", path=path, hint=hint)


def _and_parents(directory: str) -> Iterator[str]:
    yield directory
    while directory != "/":
        directory = os.path.dirname(directory)
        yield directory
