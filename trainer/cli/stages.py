"""`trainer stages`: one stage after the other."""

import os
from typing import TYPE_CHECKING

import click

from syncd.errors import UsageError
from trainer.cli.train import job_command, show
from trainer.launch.rank_env import read_rank_env

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile


@job_command
def stages(
    ctx: click.Context,
    config: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    nproc: int | None,
    allowed: tuple[str, ...],
    trust: bool,
) -> None:
    r"""Run the [[stages]] of CONFIG that are not done yet, each in <job.dir>/<name>.

    If a stage fails, the command ends with the exit code of that stage. The same command resumes with it.

    \b
    Examples:
      trainer stages stages.toml
      trainer stages stages.toml --nproc 2 --trainer.save_interval 50
    """
    from trainer.config.changes import check_allowed  # noqa: PLC0415
    from trainer.config.model_files import check_model  # noqa: PLC0415
    from trainer.stages import load_stages, pending, preview_stages, run_stages  # noqa: PLC0415

    plan = load_stages(config, overrides, trust=trust)
    check_allowed(allowed)
    if dry_run:
        for stage, contradictions in preview_stages(plan):
            click.echo(f"# stage {stage.name}")
            show(stage.config, contradictions, allowed)
    else:
        _refuse_ranks()
    for stage in pending(plan):
        check_model(stage.config, trust=trust, recorded=stage.follows)
    if dry_run:
        return
    from trainer.launch.train import train  # noqa: PLC0415

    named = {stage.config.model.path for stage in plan.stages if not stage.follows}

    def run(job: "JobFile") -> int:
        # Of a stage that follows another it was not there before.
        check_model(job, trust=trust, recorded=job.model.path not in named)
        return train(job, nproc, allowed=allowed)

    ctx.exit(run_stages(plan, run, lambda line: click.echo(line, err=True), allowed))


def _refuse_ranks() -> None:
    rank_env = read_rank_env(os.environ)
    if rank_env.origin != "alone":
        raise UsageError(
            f"this is rank {rank_env.rank} of {rank_env.world_size}, and stages are started once",
            hint="start it without torchrun and srun",
        )
