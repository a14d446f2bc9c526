"""Enters the job directory, and keeps the resolved configuration in it as `config.toml`."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import structlog
import tomli_w

from syncd.errors import DOCS, ConfigError, storage_error, storage_errors
from syncd.jobfile.keys import Key
from syncd.jobfile.loader import values_at
from syncd.jobfile.model import KEYS, JobFile, plain
from syncd.protocol.layout import STATE, Job, read_config_file
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.owner import refuse_mirrored
from syncd.protocol.permissions import modes_in
from trainer.config.changes import UNSOUND, Contradiction, check_allowed, record_changes, split
from trainer.config.load import FIRST_LINE, read_table

_HEAD = f"""{FIRST_LINE}
# `syncd watch` reads its [daemon] table here. Later starts must agree with it:
# {DOCS}/configuration.md

"""


def kept_path(directory: str) -> str:
    return f"{directory}/config.toml"


def enter_job_dir(config: JobFile, allowed: Collection[str] = ()) -> JobFile:
    """Make or reuse the job directory, keep the configuration there, and return it.

    One process of a job calls this, before any other uses the job directory.
    """
    check_allowed(allowed)
    settled = make_job_dir(config)
    with storage_errors(settled.job.dir):
        refuse_mirrored(Job.at(settled.job.dir), "a trainer")
        keep_config(settled, allowed)
    return settled


def make_job_dir(config: JobFile) -> JobFile:
    """Make the job directory, and return the configuration for it; a second call changes nothing.

    With `continue_from_checkpoint = false` it is the first of `DIR`, `DIR-2`, ... that is not there or empty, and no
    other start gets the same; the returned configuration says true, so that the next start resumes there.
    """
    disk = _disk(config)
    with storage_errors(config.job.dir):
        if config.trainer.continue_from_checkpoint:
            disk.make_directory(config.job.dir)
            return config
        moved = map(partial(_moved, config), _suffixes())
        return next(candidate for candidate in moved if _claim(disk, candidate.job.dir, config.job.source))


def next_job_dir(config: JobFile) -> JobFile:
    """Return the configuration as `make_job_dir` would return it now; nothing is made."""
    if config.trainer.continue_from_checkpoint:
        return config
    moved = map(partial(_moved, config), _suffixes())
    with storage_errors(config.job.dir):
        return next(candidate for candidate in moved if _is_free(candidate.job.dir, config.job.source))


def _moved(config: JobFile, suffix: str) -> JobFile:
    state_dir = f"{config.job.state_dir}{suffix}" if config.job.state_dir else ""
    return config.with_values(
        job={"dir": f"{config.job.dir}{suffix}", "state_dir": state_dir},
        trainer={"continue_from_checkpoint": True},
    )


def contradictions(config: JobFile, *, besides: Collection[str] = ()) -> tuple[Contradiction, ...]:
    """Return the fixed keys that differ from the copy in the job directory; none without a copy."""
    path = kept_path(config.job.dir)
    if not _is_ours(_read(path)):
        return ()
    kept, now = read_table(path), plain(config)
    fixed = (key for key in KEYS.all.values() if key.fixed and key.name not in besides)
    pairs = ((key.name, _value(kept, key), _value(now, key)) for key in fixed)
    return tuple(Contradiction(name, before, after, path) for name, before, after in pairs if before != after)


def _value(table: Mapping[str, Any], key: Key) -> Any:
    default = "none" if key.default is None else key.default
    return next(iter(values_at(table, key.name)), default)


def refuse(contradictions: Sequence[Contradiction]) -> None:
    if contradictions:
        lines = "".join(f"\n  {contradiction}" for contradiction in contradictions)
        names = " ".join(f"--allow-change {item.key}" for item in contradictions if item.key not in UNSOUND)
        allowing = f", allow it with {names}" if names else ""
        raise ConfigError(
            f"the job in this directory was started with other values:{lines}",
            hint=f"put it back{allowing}, or give --trainer.continue_from_checkpoint false for a new directory"
            " beside it",
        )


def keep_config(config: JobFile, allowed: Collection[str] = ()) -> None:
    """Write the copy durably unless this start contradicts it; record the allowed changes."""
    path = kept_path(config.job.dir)
    before, after = _read(path), (_HEAD + to_toml(config)).encode()
    changed, refused = split(contradictions(config), allowed)
    refuse(refused)
    with storage_errors(path):
        record_changes(_disk(config), config.job.dir, changed)
        for contradiction in changed:
            structlog.get_logger().warning(
                "config_changed", key=contradiction.key, old=contradiction.kept, new=contradiction.now
            )
        if before is not None and not _is_ours(before):
            _move_aside(path, before, config.job.source)
        if before != after:
            _disk(config).replace(path, after)


def to_toml(config: JobFile) -> str:
    """Return the configuration as TOML, with all keys; it reads as the same configuration."""
    return tomli_w.dumps(plain(config))


def _suffixes() -> Iterator[str]:
    yield ""
    for number in count(2):
        yield f"-{number}"


def _claim(disk: LocalDisk, directory: str, source: str) -> bool:
    """Return whether this start owns the directory: of all that find it empty, one makes the state directory."""
    if not _is_free(directory, source):
        return False
    disk.make_directory(directory)
    try:
        os.mkdir(f"{directory}/{STATE}")
    except FileExistsError:
        return False
    disk.adopt(f"{directory}/{STATE}")
    return True


def _disk(config: JobFile) -> LocalDisk:
    """Return the disk that makes files by the job's policy, before the job directory holds that policy."""
    job = config.job
    policy = {"daemon": config.daemon, "job": {"permissions": job.permissions, "group": job.group}}
    modes = modes_in(policy, job.source or "the command line")
    return LocalDisk(modes=lambda: modes)


def _is_free(directory: str, source: str) -> bool:
    """Return whether a path is free: nothing, or a directory that holds at most the file that a user starts from."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        if not os.path.lexists(directory):
            raise  # what it would be in is no directory
        return False
    path = kept_path(directory)
    return not names or (names == ["config.toml"] and _is_same(path, source) and not _is_ours(_read(path)))


def _read(path: str) -> bytes | None:
    try:
        return read_config_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error


def _is_ours(content: bytes | None) -> bool:
    return content is not None and content.startswith(FIRST_LINE.encode())


def _is_same(path: str, source: str) -> bool:
    return bool(source) and os.path.exists(source) and os.path.samefile(path, source)


def _move_aside(path: str, content: bytes, source: str) -> None:
    if not _is_same(path, source):
        raise ConfigError(
            "the trainer did not write the config.toml that is in the job directory",
            path=path,
            hint=f"move it away, or start from it: trainer train {path}",
        )
    names = (f"{os.path.dirname(path)}/config.given{suffix}.toml" for suffix in _suffixes())
    aside = next(name for name in names if _read(name) in (None, content))
    LocalDisk().replace(aside, content)
    structlog.get_logger().warning("config_set_aside", path=path, saved=aside)
