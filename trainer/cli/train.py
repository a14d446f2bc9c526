"""`trainer train`, and the options that `trainer stages` shares with it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from syncd.errors import ConfigError
from syncd.jobfile.overrides import (
    JobFileCommand,
    complete_key,
    config_argument,
    overrides_argument,
    trust_option,
)

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile
    from trainer.config.changes import Contradiction


def job_command(work: Callable[..., None]) -> click.Command:
    """Return the command that takes CONFIG, options of the file after it, and those that train and stages share."""
    dry_run = "Print the resolved file, check the model's files and change nothing."
    nproc = "Ranks to start on this machine, whatever trainer.nproc says."
    change = "Let a key differ from what the job was started with, and record it. May be given several times."
    for add in (
        click.pass_context,
        click.option(
            "--allow-change",
            "allowed",
            multiple=True,
            metavar="KEY",
            shell_complete=complete_key,
            help=change,
        ),
        trust_option,
        click.option("--nproc", type=click.IntRange(min=1), metavar="N", help=nproc),
        click.option("--dry-run", is_flag=True, help=dry_run),
        overrides_argument,
        config_argument,
    ):
        work = add(work)
    return click.command(cls=JobFileCommand, names=plugin_names)(work)


def plugin_names(key: str) -> Iterable[str]:
    """Return the names of what is installed for a key that names a plugin, such as `engine.name`."""
    from trainer.plugins import REGISTRIES  # noqa: PLC0415

    return (name for registry in REGISTRIES if registry.key == key for name in sorted(registry.installed))


def show(config: "JobFile", contradictions: "Sequence[Contradiction]", allowed: Collection[str] = ()) -> None:
    from trainer.config.job_config import to_toml  # noqa: PLC0415

    click.echo(to_toml(config), nl=False)
    click.echo(f"job directory: {config.job.dir}", err=True)
    for contradiction in contradictions:
        kind = "change" if contradiction.key in allowed else "contradiction"
        click.echo(f"{kind}: {contradiction}", err=True)


@job_command
def train(
    ctx: click.Context,
    config: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    nproc: int | None,
    allowed: tuple[str, ...],
    trust: bool,
) -> None:
    r"""Train as CONFIG says; --section.key value overrides any of its keys.

    The same command resumes: it starts from the newest full checkpoint of the job.

    \b
    Exit codes:
      0   total_steps is reached, or samples ran out
      4   no whole batch came within data.wait_timeout, ranks did not connect, or a rank does not answer
      5   another trainer trains the job
      74  the storage refused the last save, or more than sync.max_failures in a row
      75  stopped by SIGTERM or SIGUSR2 and saved, or a tinker server failed: start it again to resume
      78  the file is invalid or contradicts the job, the model is incomplete, or a GPU or a package is missing
      130 Ctrl-C before anything was trained, or twice

    \b
    Examples:
      trainer train grpo.toml
      trainer train grpo.toml --nproc 2 --sync.interval 2 --algorithm.optimizer.lr=2e-6
      torchrun --nnodes 4 --nproc-per-node 8 --no-python trainer train grpo.toml
      srun trainer train grpo.toml
      trainer train grpo.toml --dry-run
      trainer train grpo.toml --algorithm.optimizer.lr 5e-7 --allow-change algorithm.optimizer.lr
    """
    from trainer.config.load import load_config  # noqa: PLC0415
    from trainer.config.model_files import check_model  # noqa: PLC0415

    job = load_config(config, overrides, trust=trust)
    if job.stages:
        raise ConfigError("this file has [[stages]]", path=config, hint=f"trainer stages {config}")
    from trainer.config.changes import check_allowed  # noqa: PLC0415

    check_allowed(allowed)
    if dry_run:
        from trainer.config.job_config import contradictions, next_job_dir  # noqa: PLC0415

        settled = next_job_dir(job)
        show(settled, contradictions(settled), allowed)
        check_model(settled, trust=trust)
        return
    check_model(job, trust=trust)
    from trainer.launch.train import train as start  # noqa: PLC0415

    ctx.exit(start(job, nproc, allowed=allowed))
