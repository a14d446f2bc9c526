"""`syncd publish`: any directory of safetensors becomes a step."""

import json

import click

from syncd.cli.attended import Attended, noted
from syncd.cli.options import job_argument, json_option, open_job, state_dir_option
from syncd.console import Place
from syncd.protocol.attended import AttendedDisk
from syncd.protocol.disk import LocalDisk


@click.command(cls=Attended, acts="step {step} was published")
@job_argument
@click.argument("step", type=click.IntRange(min=0))
@click.argument("directory", metavar="DIR", type=Place())
@click.option(
    "--rewind", is_flag=True, help="The step may be lower than the newest: explorers go back to it."
)
@state_dir_option
@json_option
def publish(job: str, step: int, directory: str, rewind: bool, state_dir: str | None, as_json: bool) -> None:
    r"""Make the safetensors in DIR step STEP of JOB, and announce it.

    The files are copied, hashed, synced and sealed; a crash at any instant leaves either no step or a whole one.

    \b
    Example:
      syncd publish /ckpt/job 120 ./export
    """
    from syncd.publishing import publish_directory  # noqa: PLC0415

    outside = AttendedDisk(LocalDisk(), noted())
    manifest = publish_directory(open_job(job, state_dir), step, directory, rewind=rewind, outside=outside)
    if as_json:
        document = {"schema_version": 1, "step": step, "bytes": manifest.size, "digest": manifest.digest}
        click.echo(json.dumps({**document, "shards": len(manifest.shards), "kind": manifest.kind}))
    else:
        shards = f"{count} shards" if (count := len(manifest.shards)) != 1 else "1 shard"
        click.echo(f"step {step}: {shards}, {manifest.size} bytes, sealed and announced")
