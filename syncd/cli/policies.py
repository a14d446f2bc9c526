"""The options that override the `[daemon]` table, shared by the verbs that follow a policy."""

import dataclasses
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from syncd.config import CHOICES, DaemonConfig, check_value, load
from syncd.console import Place
from syncd.errors import ConfigError
from syncd.protocol.layout import CONFIG, Job, job_disk
from syncd.protocol.permissions import modes_of
from syncd.stall.verbs import noted

F = TypeVar("F", bound=Callable[..., Any])


def _in_range(_: click.Context, param: click.Parameter, value: Any) -> Any:
    try:
        return None if value is None else check_value(str(param.name), value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from error


_POLICY = (
    click.option(
        "--config", type=Place(), help="TOML file with a [daemon] table; JOB/config.toml if it is there."
    ),
    click.option("--keep-last", type=int, callback=_in_range, help="Newest sync steps to keep (2)."),
    click.option(
        "--keep-every", type=int, callback=_in_range, help="Keep every sync step that is a multiple of this."
    ),
    click.option(
        "--keep-full", type=int, callback=_in_range, help="Newest full checkpoints to keep (0: all)."
    ),
    click.option(
        "--keep-previous/--no-keep-previous",
        default=None,
        help="Whether the version before the newest stays if it is a full checkpoint beyond --keep-full (it does).",
    ),
    click.option("--max-bytes", callback=_in_range, help="Byte budget of all steps, such as 500GiB."),
    click.option(
        "--partial-grace",
        type=float,
        callback=_in_range,
        help="Seconds after which an unfinished old step goes (3600).",
    ),
    click.option(
        "--prune-foreign/--keep-foreign", default=None, help="Whether steps that others wrote may go."
    ),
)

_DAEMON = (
    click.option("--prune/--no-prune", default=None, help="Whether anything is removed."),
    click.option(
        "--trash-grace", type=float, callback=_in_range, help="Seconds that removed steps stay readable (75)."
    ),
    click.option(
        "--poll",
        type=float,
        callback=_in_range,
        help="Seconds between two looks where no events come (0.25).",
    ),
    click.option(
        "--reconcile",
        type=float,
        callback=_in_range,
        help="Seconds between two examinations of everything (60).",
    ),
    click.option(
        "--ttl",
        type=float,
        callback=_in_range,
        help="Silence in seconds after which an explorer counts as dead (60).",
    ),
    click.option(
        "--takeover",
        type=float,
        callback=_in_range,
        help="Silence in seconds after which a stand-by takes over (15).",
    ),
    click.option(
        "--verify", type=click.Choice(CHOICES["verify"]), help="What is checked before publishing (header)."
    ),
    click.option("--watch", type=click.Choice(CHOICES["watch"]), help="How to notice changes (auto)."),
    click.option(
        "--exit-when-left", is_flag=True, default=None, help="Stop when all explorers and trainers left."
    ),
    click.option("--metrics-port", type=int, callback=_in_range, help="Prometheus endpoint on this port."),
    click.option("--metrics-host", help="Address of the endpoint (127.0.0.1)."),
    click.option("--metrics-textfile", type=Place(), help="Prometheus textfile to keep up to date."),
    click.option(
        "--log-format", type=click.Choice(CHOICES["log_format"]), help="JSON unless on a terminal (auto)."
    ),
    click.option("--log-level", type=click.Choice(CHOICES["log_level"]), help="What is logged (info)."),
)


def policy_options(command: F) -> F:
    """Add the options of retention."""
    return _with(command, _POLICY)


def daemon_options(command: F) -> F:
    """Add all options of the daemon."""
    return _with(_with(command, _DAEMON), _POLICY)


def read_config(job: Job, given: Mapping[str, Any]) -> DaemonConfig:
    """Return the configuration for a job: the file, with the given options on top.

    Raises:
        ConfigError: The file or an option is not usable.
    """
    values = dict(given)
    named = values.pop("config", None)
    kept = f"{job.root}/{CONFIG}"
    with noted()("read", named or kept):
        if named is None and os.path.exists(kept):
            return load(kept, values, trusted=_is_own(kept), kept=True)
        return load(named, values)


def _is_own(path: str) -> bool:
    """Say whether nobody but this user and root can have written a file."""
    found = os.stat(path)
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def with_policy(job: Job, config: DaemonConfig) -> Job:
    """Return the job as a daemon with this configuration makes files in it, and set this process's umask to it.

    Raises:
        ConfigError: The policy means nothing on this host, or not for this user.
    """
    modes = modes_of(config.permissions, config.group)
    if modes.exact:
        os.umask(
            ~modes.file & 0o077
        )  # nothing is more open for a moment, and a setgid directory's bit is inherited
    return dataclasses.replace(job, disk=job_disk(job.root, job.state, modes))


def _with(command: F, options: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
