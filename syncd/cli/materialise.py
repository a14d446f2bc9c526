"""`syncd materialise`: writes a step as the directory that a full save would have been."""

import os

import click

from syncd.arguments import job_argument, step_argument
from syncd.cli.options import (
    delta_tool,
    json_option,
    open_job,
    print_json,
    state_dir_option,
)
from syncd.console import UncheckedPath
from syncd.errors import plain
from syncd.protocol.local_disk import LocalDisk
from syncd.stall.calls import TrackedDisk
from syncd.stall.verbs import MountVerb, pending_calls


@click.command(cls=MountVerb, cleans_up=True)
@job_argument
@step_argument()
@click.option(
    "--to",
    "target",
    required=True,
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    help="The new directory.",
)
@state_dir_option
@json_option
def materialise(job: str, step: int, target: str, state_dir: str | None, as_json: bool) -> None:
    r"""Write STEP of JOB, also a delta, as the model directory that a full save would have been, byte for byte.

    The keyframe and each delta after it are read once. DIR appears after every byte was compared with the digests of
    the step. It must not exist, or be empty, and lie outside of the job. This needs the extra `delta`.

    \b
    Exit codes:
      2   there is no such step, the step has no weights, or DIR cannot be used
      65  the step or a delta before it is damaged
      75  a step of the chain was removed meanwhile: `syncd pin JOB STEP` keeps it

    \b
    Examples:
      syncd materialise /ckpt/job 121 --to /scratch/step121
    """
    calls = pending_calls()
    opened = open_job(job, state_dir)
    with calls("find", os.path.abspath(target)):
        directory = os.path.realpath(target)
    manifest = delta_tool("materialise")(opened, step, directory, TrackedDisk(LocalDisk(), calls))
    if as_json:
        document = {"step": step, "directory": directory, "kind": manifest.kind, "digest": manifest.digest}
        print_json({**document, "bytes": manifest.whole_size})
    else:
        files = len(manifest.whole_shards) + len(manifest.whole_files)
        what = f"{files} files, {manifest.whole_size} bytes, each byte as in a full save"
        click.echo(f"step {step}: {what}: {plain(directory)}")
