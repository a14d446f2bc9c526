"""`explorer run`: a complete explorer."""

from typing import TYPE_CHECKING

import click

from explorer_hooks.cli.options import explorer_command, named, show
from syncd.registered import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncd.jobfile.model import JobFile


@explorer_command
@click.option("--stage", metavar="NAME", help="Explore this one of the file's [[stages]], once it has begun.")
def run(
    config: str,
    overrides: tuple[str, ...],
    name: str | None,
    stage: str | None,
    health: str | None,
    dry_run: bool,
    trust: bool,
) -> None:
    r"""Explore as CONFIG says: generate responses to its tasks, score them, and write experiences for the trainer.

    --section.key value overrides any key of CONFIG. On SIGTERM the current batch is dropped as a whole; a second
    signal ends the command at once, and nothing is lost.

    \b
    Exit codes:
      0   the job is finished, the trainer has left, all tasks are done, or SIGTERM or Ctrl-C
      2   another live explorer has the name
      4   no trainer came, or the stage did not begin, within sync.timeout
      65  the explorer's state file is damaged
      69  the engine is dead, or ran no usable version for sync.timeout seconds
      75  another process writes under this name
      78  the file, a task or the reward function cannot be used

    \b
    Examples:
      explorer run grpo.toml --name e0
      explorer run grpo.toml --name e1 --explorer.engine.kind vllm --explorer.engine.address http://127.0.0.1:8000
      explorer run stages.toml --stage grpo --name e0
      explorer run grpo.toml --dry-run
    """
    from explorer_hooks.run.load import load_file  # noqa: PLC0415
    from syncd.jobfile.code_trust import require_own_model  # noqa: PLC0415

    file = load_file(config, named(overrides, name), stage, trust=trust)
    if dry_run:
        show(file)
        return
    if stage is not None:
        from explorer_hooks.run.stages import wait_for  # noqa: PLC0415

        begun = wait_for(file, stage)
        if isinstance(begun, str):
            click.echo(f"explorer ended: {begun}", err=True)
            return
        file = begun
    runs_code, recorded = file.model.trust_remote_code and not trust, stage is not None
    require_own_model(file.model.path, runs_code=runs_code, recorded=recorded)
    click.echo(f"explorer ended: {_runner_of(file)(file, health)}", err=True)


def _runner_of(file: "JobFile") -> "Callable[[JobFile, str | None], str]":
    """Return what explores: a part's runner if the file has its table, else that of prompts."""
    from explorer_hooks.run.extensions import RUNNERS  # noqa: PLC0415 - needs pydantic
    from syncd.jobfile.roles import RunnerSection, given_tables  # noqa: PLC0415

    for table in given_tables(file.explorer, RunnerSection):
        runner: Callable[[JobFile, str | None], str] = registered(RUNNERS)[table].load()
        return runner
    from explorer_hooks.run.run import run as explore  # noqa: PLC0415

    return explore
