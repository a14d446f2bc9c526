"""`trainer train`: the loop, on this machine or as one rank of torchrun or srun."""

import click

from syncd.errors import ConfigError
from trainer.cli.options import (
    TAKES_KEYS,
    allow_change_option,
    config_argument,
    dry_run_option,
    nproc_option,
    show,
)


@click.command(context_settings=TAKES_KEYS)
@config_argument
@dry_run_option
@nproc_option
@allow_change_option
@click.pass_context
def train(
    ctx: click.Context,
    config: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    nproc: int | None,
    allowed: tuple[str, ...],
) -> None:
    """Train as CONFIG says, with any key of it overridden by --section.key value.

    \b
    Examples:
      trainer train grpo.toml
      trainer train grpo.toml --nproc 2 --sync.interval 2 --algorithm.optimizer.lr=2e-6
      torchrun --nnodes 4 --nproc-per-node 8 -m trainer train grpo.toml
      srun trainer train grpo.toml
      trainer train grpo.toml --dry-run
      trainer train grpo.toml --algorithm.optimizer.lr 5e-7 --allow-change algorithm.optimizer.lr
    """  # noqa: D301 - click's mark is one backspace
    from trainer.config.load import load_config  # noqa: PLC0415
    from trainer.config.model_files import check_model  # noqa: PLC0415

    job = load_config(config, overrides)
    if job.stages:
        raise ConfigError("this file has [[stages]]", path=config, hint=f"trainer stages {config}")
    from trainer.config.changes import check_allowed  # noqa: PLC0415

    check_allowed(allowed)
    if dry_run:
        from trainer.config.job_config import contradictions, moved_to, next_job_dir  # noqa: PLC0415

        settled = moved_to(job, next_job_dir(job))
        show(settled, contradictions(settled), allowed)
        check_model(settled)
        return
    check_model(job)
    from trainer.launch.train import train as start  # noqa: PLC0415

    ctx.exit(start(job, nproc, allowed=allowed))
