"""`syncd mirror`: copy a job's versions to an object store, or to another job."""

import shlex
from typing import Any

import click

from syncd.cli import options
from syncd.config import parse_size
from syncd.console import UncheckedPath
from syncd.errors import ConfigError, UsageError

AFTER = "watch"
"""The verb behind which `--help` lists this one."""

_STORE_ONLY = ("keep", "keep_for", "prune")


def _rate(_: click.Context, __: click.Parameter, value: str | None) -> int:
    try:
        return parse_size(value) if value else 0
    except ConfigError as error:
        raise click.BadParameter(f"{error.message}; write it like 20MiB") from error


@click.command()
@click.argument("source", type=UncheckedPath(), metavar="SOURCE")
@click.argument("target", type=UncheckedPath(), metavar="[TARGET]", required=False)
@click.option("--once", is_flag=True, help="Copy what is published now, and exit.")
@click.option(
    "--detach",
    is_flag=True,
    help="Make the mirrored job SOURCE a job of its own; its mirror must have ended.",
)
@click.option(
    "--poll",
    type=click.FloatRange(0.01, 3600),
    metavar="S",
    show_default="0.25, for a job on a local disk 0.05",
    help="Look at the source after this many seconds.",
)
@click.option(
    "--max-rate",
    "rate",
    metavar="SIZE",
    callback=_rate,
    help="Copy at most so much a second on average, such as 20MiB.",
)
@click.option(
    "--experiences",
    is_flag=True,
    help="Pass experiences back to the job of the trainer; give it at both ends.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    metavar="N",
    show_default="3",
    help="In a store: keep this many of the newest versions.",
)
@click.option(
    "--keep-for",
    type=click.FloatRange(0, 86400 * 365),
    metavar="S",
    show_default="86400",
    help="In a store: keep a version for this many seconds after the next one.",
)
@click.option(
    "--prune/--no-prune", default=None, show_default="prune", help="In a store: delete what is not kept."
)
@options.metrics_port_option
@options.metrics_textfile_option
@options.log_format_option
def mirror(source: str, target: str | None, *, detach: bool, **choices: Any) -> None:
    r"""Copy the published versions of SOURCE to TARGET, as a service that can be killed at any instant.

    One of the two is a job directory, the other one too or an object store, such as s3://BUCKET/PREFIX. A TARGET that
    is a directory becomes a job that this command leads in place of `syncd watch`: engines follow it as usual, its
    steps are pruned by [daemon] in its config.toml, and trainers, `syncd publish` and `syncd watch` refuse to write
    there. A second mirror of the same job stands by.

    A mirror that is behind copies the newest version, and none of those in between. What fails, such as a store that
    is down or credentials that have expired, is logged and tried again.

    \b
    Exit codes:
      0   after SIGTERM; with --once when the newest version is there
      2   neither place is a job, or an option does not belong to TARGET
      5   with --once: another mirror leads TARGET; with --detach: the mirror still runs
      74  there is no such job, or its mount does not answer; with --once: the store does not answer
      75  with --once: the source has changed meanwhile
      78  TARGET is a job of its own or a mirror of another job; with --once: the store refuses the credentials

    \b
    Examples:
      syncd mirror /ckpt/job s3://bucket/job
      syncd mirror s3://bucket/job /scratch/job
      syncd mirror /ckpt/job /other/job --max-rate 20MiB
      syncd mirror /ckpt/job s3://bucket/job --experiences --keep 5
      syncd mirror /scratch/job --detach
    """
    from syncd.parts.mirror import run  # noqa: PLC0415
    from syncd.parts.mirror.places import is_store  # noqa: PLC0415

    if detach:
        _refuse_with_detach(source, target, choices)
        run.detach(source)
        click.echo(f"{source} is a job of its own now; next: syncd watch {shlex.quote(source)}")
        return
    if target is None:
        raise UsageError("no TARGET is given", hint=f"syncd mirror {shlex.quote(source)} s3://BUCKET/PREFIX")
    if is_store(source) and is_store(target):
        raise UsageError("one of the two must be a job directory", hint=f"syncd mirror {source} /scratch/job")
    store_only = {name: choices.pop(name) for name in _STORE_ONLY}
    if not is_store(target):
        _refuse_store_options(target, store_only)
    run.run_mirror(source, target, _choices(store_only, choices))


def _choices(store_only: dict[str, Any], choices: dict[str, Any]) -> Any:
    from syncd.parts.mirror.run import MirrorOptions  # noqa: PLC0415
    from syncd.parts.mirror.store import StoreRetention  # noqa: PLC0415

    fields = {"keep": "keep", "keep_for": "grace", "prune": "prune"}
    given = {fields[name]: value for name, value in store_only.items() if value is not None}
    daemon = {name: choices.pop(name) for name in ("metrics_port", "metrics_textfile", "log_format")}
    return MirrorOptions(**choices, retention=StoreRetention(**given), daemon=daemon)


def _refuse_with_detach(source: str, target: str | None, choices: dict[str, Any]) -> None:
    named = [name for name, value in choices.items() if value not in (None, False, 0)]
    if target is not None or named:
        raise UsageError(
            "--detach takes one job and no other option", hint=f"syncd mirror {shlex.quote(source)} --detach"
        )


def _refuse_store_options(target: str, store_only: dict[str, Any]) -> None:
    named = next((name for name, value in store_only.items() if value is not None), None)
    if named is not None:
        raise UsageError(
            f"--{named.replace('_', '-')} is for object stores: a job has its retention in config.toml",
            hint=f"[daemon] keep_last = 2  # in {target}/config.toml",
        )
