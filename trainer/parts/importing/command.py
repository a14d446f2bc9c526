"""`trainer import`: turn a configuration of Trinity-RFT, verl, prime-rl or TRL into a job file."""

import click

from syncd.console import UncheckedPath
from syncd.jobfile.overrides import JobFileCommand, check_file, overrides_argument
from trainer.cli.train import plugin_names
from trainer.parts.importing.table import PROJECTS, read_table

AFTER = "stages"
"""The verb behind which `--help` lists this one."""


@click.command("import", cls=JobFileCommand, names=plugin_names)
@click.argument("file", metavar="[FILE]", required=False, default=None, type=UncheckedPath())
@overrides_argument
@click.option(
    "--to",
    metavar="FILE",
    type=UncheckedPath(),
    help="Write the job file here instead of to stdout.",
)
@click.option(
    "--from",
    "source",
    type=click.Choice(PROJECTS),
    show_default="told by the keys",
    help="The project that FILE belongs to.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one of their keys, whatever FILE says."
)
@click.option(
    "--without", multiple=True, metavar="KEY", help="Leave out one of their keys, or a table of them."
)
@click.option(
    "--from-checkpoint",
    "checkpoint",
    metavar="DIR",
    type=UncheckedPath(file_okay=False),
    help="Start from the weights of a step, JOB/global_step_N: export them beside the job file.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="With --from-checkpoint: take optimizer, schedule and step number too (verl with FSDP2).",
)
@click.option(
    "--keys",
    "keys_of",
    type=click.Choice(PROJECTS),
    help="Print what becomes of each key of a project, and end.",
)
@click.pass_context
def import_(
    ctx: click.Context,
    file: str | None,
    overrides: tuple[str, ...],
    to: str | None,
    source: str | None,
    settings: tuple[str, ...],
    without: tuple[str, ...],
    checkpoint: str | None,
    resume: bool,
    keys_of: str | None,
) -> None:
    r"""Turn FILE, a configuration of Trinity-RFT, verl, prime-rl or TRL, into a job file.

    FILE is YAML, TOML, JSON, or a script (.sh, .txt) with verl's key=value or TRL's --key value; it is never run.
    Nothing is guessed. While a key that changes training has no counterpart, nothing is written, and the command says
    what to do about each such key.

    \b
    Exit codes:
      2   the arguments do not fit, the job file exists, or the keys are of no known project or of several
      65  with --from-checkpoint: the step is damaged
      78  keys cannot be mapped, or FILE or the result is invalid: nothing was written

    \b
    Examples:
      trainer import gsm8k.yaml --to job.toml
      trainer import run_grpo.sh --to job.toml --set trainer.total_training_steps=200 --model.path /shared/models/base
      trainer import grpo.yaml --from trl --set num_processes=8 --without lr_scheduler_type
      trainer import config.yaml --to job.toml --from-checkpoint /ckpt/verl-job/global_step_200
      trainer import config.yaml --to job.toml --from-checkpoint /ckpt/verl-job/global_step_200 --resume
      trainer import --keys verl
    """
    from trainer.parts.importing.key_tables import markdown  # noqa: PLC0415
    from trainer.parts.importing.report import report  # noqa: PLC0415
    from trainer.parts.importing.run import import_config  # noqa: PLC0415

    if keys_of is not None:
        click.echo(markdown(read_table(keys_of)), nl=False)
        return
    path = check_file("FILE", file or "")
    imported = import_config(
        path,
        to,
        source=source,
        overrides=overrides,
        settings=settings,
        without=without,
        checkpoint=checkpoint,
        resume=resume,
    )
    if to is None:
        click.echo(imported.text, nl=False)
    for line in report(imported, to):
        click.echo(line, err=True)
    ctx.exit(78 if imported.outcome.refusals else 0)
