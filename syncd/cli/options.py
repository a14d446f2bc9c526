"""Arguments and options that several verbs share, and what they name: the job and the `[daemon]` configuration."""

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from syncd.config import CHOICES, DaemonConfig, check_value, daemon_tables, load
from syncd.console import UncheckedPath
from syncd.errors import ConfigError, JobMissingError, UsageError, storage_errors
from syncd.extras import install_command
from syncd.protocol.disk import exists
from syncd.protocol.layout import CONFIG, Job, job_disk, parse_step_name
from syncd.protocol.local_disk import again
from syncd.protocol.owner import check_owner, is_own
from syncd.protocol.path_trust import weak_level
from syncd.protocol.permissions import modes_of
from syncd.registered import registered
from syncd.stall.calls import PendingCalls, tracked
from syncd.stall.verbs import pending_calls

SCHEMA_VERSION = 1
"""Of a document that names no other one. It grows when a documented field changes its meaning or goes."""

F = TypeVar("F", bound=Callable[..., Any])


state_dir_option = click.option(
    "--state-dir",
    type=UncheckedPath(file_okay=False),
    envvar="SYNCD_STATE_DIR",
    metavar="DIR",
    show_default="JOB/.syncd",
    help="Directory of the daemon's files if it does not write to the job directory.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def json_text(document: Mapping[str, Any], schema: int = SCHEMA_VERSION) -> str:
    """Return a document as one line of JSON; docs/json.md is the contract."""
    import json  # noqa: PLC0415 - most commands print none

    return json.dumps({"schema_version": schema, **document}, allow_nan=False)


def print_json(document: Mapping[str, Any], schema: int = SCHEMA_VERSION) -> None:
    click.echo(json_text(document, schema))


def exit_on_sigterm() -> None:
    """Exit on SIGTERM through `sys.exit`, so that the command cleans up and restores the terminal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def seconds_option(
    name: str, text: str, default: float | None = None, least: float = 0, most: float | None = None
) -> Callable[[F], F]:
    """Return a decorator that adds an option whose value is a number of seconds."""
    return click.option(name, type=click.FloatRange(least, most), default=default, metavar="S", help=text)


def timeout_option(default: float) -> Callable[[F], F]:
    """Return a decorator that adds `--timeout` with a default in seconds."""
    return seconds_option("--timeout", "Give up after this many seconds.", default)


def open_job(job: str, state_dir: str | None, calls: PendingCalls | None = None) -> Job:
    """Return the job; its calls to the file system are noted.

    Args:
        job: The job directory, as it was given.
        state_dir: The state directory, as it was given.
        calls: Where they are noted; by default where the verb that runs notes its calls.
    """
    noting = calls or pending_calls()
    opened = find_job(job, state_dir, noting)
    with noting("stat", opened.root):
        is_there = os.path.isdir(opened.root)
    if not is_there:
        hint = f"findmnt -T {job}, or for a new one: mkdir -p {job}"
        raise JobMissingError("the job directory does not exist", path=job, hint=hint)
    return opened


def find_job(job: str, state_dir: str | None, calls: PendingCalls | None = None) -> Job:
    """Return the job, whose directory need not exist yet."""
    noting = calls or pending_calls()
    with noting("find", os.path.abspath(job)):
        directory, name = os.path.split(os.path.realpath(job))
        if parse_step_name(name) is not None:
            raise UsageError(f"{job} is a step; its job is {directory}")
        opened = tracked(Job.at(job, state_dir), noting)
    if not is_own(opened):
        check_owner(opened)
    return opened


def delta_tool(name: str) -> Any:
    """Return a function that makes or reads deltas: an entry point of `syncd.delta`; numpy and pyarrow are loaded."""
    point = registered("syncd.delta").get(name)
    if point is None:
        raise ConfigError("this installation reads no deltas", hint=install_command("delta"))
    return point.load()


def _in_range(_: click.Context, param: click.Parameter, value: Any) -> Any:
    try:
        return None if value is None else check_value(str(param.name), value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from error


def _setting(
    name: str, text: str, metavar: str | None = None, kind: Any = None, **more: Any
) -> Callable[[F], F]:
    """Return a decorator that adds an option for a key of the `[daemon]` table, and shows the key's default."""
    option, _, opposite = name.partition("/")
    default = getattr(DaemonConfig(), option.removeprefix("--").replace("-", "_"))
    if opposite:
        default = (option if default else opposite).removeprefix("--")
    return click.option(
        name,
        type=kind,
        default=None,
        metavar=metavar,
        show_default=False if default is False or default == "" else str(default),
        help=text,
        **more,
    )


def _checked(name: str, text: str, metavar: str, kind: Any = None) -> Callable[[F], F]:
    return _setting(name, text, metavar, kind, callback=_in_range)


def _one_of(name: str, text: str) -> Callable[[F], F]:
    return _setting(name, text, kind=click.Choice(CHOICES[name.removeprefix("--").replace("-", "_")]))


_RETENTION = (
    click.option(
        "--config",
        type=UncheckedPath(),
        metavar="FILE",
        show_default="JOB/config.toml",
        help="Read the [daemon] table of this TOML file.",
    ),
    _checked("--keep-last", "Keep this many of the newest sync steps.", "N", int),
    _checked("--keep-every", "Keep every sync step that is a multiple of this; 0: none.", "N", int),
    _checked("--keep-full", "Keep this many of the newest full checkpoints; 0: all.", "N", int),
    _setting("--keep-previous/--no-keep-previous", "Keep the previous version even beyond --keep-full."),
    _checked("--max-bytes", "Keep all steps together below this size, such as 500GiB; 0: any size.", "SIZE"),
    _checked("--partial-grace", "Remove an unfinished old step after this many seconds.", "S", float),
    _setting("--prune-foreign/--keep-foreign", "Allow pruning steps that other frameworks wrote."),
)

metrics_port_option = _checked(
    "--metrics-port", "Serve Prometheus metrics on this port; 0: on none.", "PORT", int
)
metrics_textfile_option = _setting(
    "--metrics-textfile", "Keep this Prometheus textfile up to date.", "FILE", UncheckedPath()
)
log_format_option = _one_of("--log-format", "How to log; auto: JSON unless on a terminal.")

_DAEMON = (
    _setting("--prune/--no-prune", "Remove the steps that retention does not keep."),
    _checked("--trash-grace", "Keep removed steps readable for this many seconds.", "S", float),
    _checked("--poll", "Poll after this many seconds where no change events arrive.", "S", float),
    _checked("--reconcile", "Examine all steps again after this many seconds.", "S", float),
    _checked("--ttl", "Count an explorer as dead after this many seconds without a heartbeat.", "S", float),
    _checked(
        "--takeover", "Take over after this many seconds without a heartbeat of the leader.", "S", float
    ),
    _one_of("--verify", "What to check before publishing."),
    _one_of("--watch", "How to detect changes."),
    _setting("--exit-when-left", "Exit once all explorers and trainers have left.", is_flag=True),
    metrics_port_option,
    _setting("--metrics-host", "Serve them on this address.", "HOST"),
    metrics_textfile_option,
    log_format_option,
    _one_of("--log-level", "Log this level and above."),
)


def policy_options(command: F) -> F:
    return functools.reduce(lambda decorated, option: option(decorated), reversed(_RETENTION), command)


def daemon_options(command: F) -> F:
    options = (*_DAEMON, *_of_parts())
    return policy_options(
        functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)
    )


def _of_parts() -> Iterator[Callable[[F], F]]:
    """Yield decorators that add the options for the tables of parts."""
    for point in daemon_tables().values():
        yield from point.load().options()


def read_config(job: Job, overrides: Mapping[str, Any]) -> DaemonConfig:
    """Return the configuration for a job: the file, overridden by the given options."""
    values = _as_table(overrides)
    named = values.pop("config", None)
    kept = f"{job.root}/{CONFIG}"
    with pending_calls()("read", named or kept):
        if named is None and has_config(job):
            return load(kept, values, trusted=_is_users_own(kept), kept=True)
        return load(named, values)


def _as_table(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as `[daemon]` has them: `rolling__canaries` is the key `canaries` of the table `rolling`."""
    table: dict[str, Any] = {}
    for name, value in overrides.items():
        part, _, key = name.partition("__")
        if not key:
            table[name] = value
        elif value is not None:
            table.setdefault(part, {})[key] = value
    return table


def has_config(job: Job) -> bool:
    """Return whether the job has its own file of configuration; a link is one, wherever it leads.

    Without the file everything has its default, which removes what the file may protect: no error counts as absence.
    """
    path = f"{job.root}/{CONFIG}"
    with storage_errors(path):
        return exists(job.disk, path)


def _is_users_own(path: str) -> bool:
    """Return whether only this user and root can have written a file."""
    try:
        return again(functools.partial(weak_level, path)) is None
    except OSError:
        return False  # whoever reads it says why it cannot be reached


def with_policy(job: Job, config: DaemonConfig) -> Job:
    """Return the job with the file modes of this configuration, and set the umask of this process to match."""
    modes = modes_of(config.permissions, config.group)
    if modes.exact:
        os.umask(
            ~modes.file & 0o077
        )  # nothing is more open for a moment, and a setgid directory's bit is inherited
    return dataclasses.replace(job, disk=job_disk(job.root, job.state, modes))
