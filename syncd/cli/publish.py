"""`syncd publish`: publishes any directory of safetensors as a step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from syncd.arguments import job_argument, no_step_names, step_argument, step_names
from syncd.cli.options import (
    delta_tool,
    json_option,
    open_job,
    print_json,
    state_dir_option,
)
from syncd.console import UncheckedPath
from syncd.errors import UsageError, plain
from syncd.protocol.disk import MISSING
from syncd.stall.calls import TrackedDisk
from syncd.stall.verbs import MountVerb, pending_calls

if TYPE_CHECKING:
    from syncd.protocol.disk import Disk
    from syncd.protocol.layout import Job
    from syncd.protocol.manifest import Manifest
    from syncd.protocol.probe import Probe

_NAMED = 5


@click.command(cls=MountVerb, changes="step {step} was published", cleans_up=True)
@job_argument
@step_argument(completes=no_step_names)
@click.argument("directory", metavar="DIR", type=UncheckedPath(file_okay=False))
@click.option("--rewind", is_flag=True, help="Allow a step lower than the newest; explorers roll back to it.")
@click.option("--allow-nonfinite", is_flag=True, help="Publish weights even if they hold NaN or infinity.")
@click.option(
    "--probe",
    type=UncheckedPath(),
    metavar="FILE",
    help="A probe that `syncd probe DIR` printed: engines that load the step are checked by it.",
)
@click.option(
    "--baseline",
    type=UncheckedPath(),
    metavar="FILE",
    help="What `syncd probe` printed of the model that engines start with; recorded once a job.",
)
@click.option(
    "--delta-from",
    "parent",
    type=click.IntRange(min=0),
    metavar="STEP",
    shell_complete=step_names,
    help="Store only what changed since this step of the job.",
)
@state_dir_option
@json_option
def publish(
    job: str,
    step: int,
    directory: str,
    rewind: bool,
    allow_nonfinite: bool,
    probe: str | None,
    baseline: str | None,
    parent: int | None,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Publish the safetensors in DIR as step STEP of JOB, and announce it.

    DIR must be complete: every shard and tensor that its index and its file names promise. The command takes files
    that end in .safetensors, .json, .txt, .model, .jinja, .tiktoken or .py, and follows links to files. It copies,
    checks, hashes, syncs and seals them: a crash at any instant leaves either no step or a whole one.

    With --baseline the difference between each engine and your trainer is measured before the first version, and
    versions are proven more closely.

    With --delta-from the step is stored as the changes of an earlier one, if the shards have the same layout and the
    changes are few. Otherwise it is stored whole, and the command says why. This needs the extra `delta`.

    \b
    Exit codes:
      2   nothing to publish, the step exists, or it is below the newest one and --rewind is missing
      65  DIR is not complete, a weight is not finite, a probe's file is no probe, or the parent is damaged
      75  the parent was removed meanwhile

    \b
    Examples:
      syncd publish /ckpt/job 120 ./export
      syncd publish /ckpt/job 0 ~/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d
      syncd probe ./export > probe.json && syncd publish /ckpt/job 120 ./export --probe probe.json
      syncd probe ./base > base.json && syncd publish /ckpt/job 1 ./export --probe probe.json --baseline base.json
      syncd publish /ckpt/job 121 ./export --delta-from 120
    """
    from syncd.publishing import FollowingDisk, publish_export, read_export  # noqa: PLC0415

    opened, disk = open_job(job, state_dir), TrackedDisk(FollowingDisk(), pending_calls())
    answer = None if probe is None else _probe_in(disk, probe)
    export = read_export(disk, directory)
    choices: dict[str, Any] = {"rewind": rewind, "allow_nonfinite": allow_nonfinite, "probe": answer}
    if baseline is not None:
        choices["before_seal"] = _baseline_recorder(opened, _probe_in(disk, baseline), baseline)
    if parent is None:
        manifest, why_whole = publish_export(opened, step, disk, export, **choices), ""
    else:
        manifest, why_whole = delta_tool("publish")(opened, step, disk, export, parent, **choices)
    if as_json:
        document = {"step": step, "bytes": manifest.size, "digest": manifest.digest}
        more = {"shards": len(manifest.shards), "kind": manifest.kind, "skipped": export.skipped}
        print_json({**document, **more, "whole_bytes": manifest.whole_size, "why_whole": why_whole})
    else:
        _report_skipped(export.skipped)
        click.echo(f"step {step}: {_stored(manifest, why_whole)}, sealed and announced")


def _stored(manifest: "Manifest", why_whole: str) -> str:
    if manifest.delta is not None:
        ratio = manifest.whole_size / manifest.size
        share = manifest.delta.changed / manifest.delta.elements
        return f"a delta of step {manifest.delta.parent}, {manifest.size} bytes ({ratio:.1f}x, {share:.2%} changed)"
    shards = f"{count} shards" if (count := len(manifest.shards)) != 1 else "1 shard"
    whole = f", whole because {plain(why_whole)}" if why_whole else ""
    return f"{shards}, {manifest.size} bytes{whole}"


def _probe_in(disk: "Disk", path: str) -> "Probe":
    from syncd.protocol.probe import read_probe  # noqa: PLC0415 - few steps are published with one

    try:
        return read_probe(disk, path)
    except MISSING as error:
        raise UsageError(
            "the probe's file does not exist", path=path, hint="syncd probe DIR > FILE"
        ) from error


def _baseline_recorder(job: "Job", probe: "Probe", path: str) -> Callable[[], None]:
    """Return what records, unless the job has it, what the model answers that engines start with."""
    from syncd.protocol.probe import write_base_probe  # noqa: PLC0415 - few steps are published with one

    return partial(write_base_probe, job, probe, path)


def _report_skipped(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        click.echo(plain(f"not copied: {', '.join(names[:_NAMED])}{more}"), err=True)
