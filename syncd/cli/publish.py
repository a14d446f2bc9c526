"""`syncd publish`: any directory of safetensors becomes a step."""

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from syncd.cli.options import job_argument, json_option, open_job, state_dir_option
from syncd.console import Place
from syncd.errors import plain
from syncd.stall.calls import AttendedDisk
from syncd.stall.verbs import Attended, noted

_NAMED = 5


@click.command(cls=Attended, acts="step {step} was published")
@job_argument
@click.argument("step", type=click.IntRange(min=0))
@click.argument("directory", metavar="DIR", type=Place())
@click.option(
    "--rewind", is_flag=True, help="The step may be lower than the newest: explorers go back to it."
)
@click.option("--allow-nonfinite", is_flag=True, help="Publish weights that hold NaN or infinity too.")
@state_dir_option
@json_option
def publish(
    job: str,
    step: int,
    directory: str,
    rewind: bool,
    allow_nonfinite: bool,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Make the safetensors in DIR step STEP of JOB, and announce it.

    DIR must be whole: every shard and tensor that its index and its file names promise. Links to files are followed.
    The files are copied, checked, hashed, synced and sealed; a crash at any instant leaves either no step or a whole
    one.

    \b
    Examples:
      syncd publish /ckpt/job 120 ./export
      syncd publish /ckpt/job 0 ~/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d
    """
    from syncd.publishing import FollowingDisk, publish_export, read_export  # noqa: PLC0415

    opened, disk = open_job(job, state_dir), AttendedDisk(FollowingDisk(), noted())
    export = read_export(disk, directory)
    with _terminable():
        manifest = publish_export(opened, step, disk, export, rewind=rewind, allow_nonfinite=allow_nonfinite)
    if as_json:
        document = {"schema_version": 1, "step": step, "bytes": manifest.size, "digest": manifest.digest}
        more = {"shards": len(manifest.shards), "kind": manifest.kind, "skipped": export.skipped}
        click.echo(json.dumps({**document, **more}))
    else:
        _tell_skipped(export.skipped)
        shards = f"{count} shards" if (count := len(manifest.shards)) != 1 else "1 shard"
        click.echo(f"step {step}: {shards}, {manifest.size} bytes, sealed and announced")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this command as an error does: what it has half written is removed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = {number: handler for number, handler in handlers.items() if handler is signal.SIG_DFL}
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    raise click.exceptions.Exit(128 + number)


def _tell_skipped(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        click.echo(plain(f"not copied: {', '.join(names[:_NAMED])}{more}"), err=True)
