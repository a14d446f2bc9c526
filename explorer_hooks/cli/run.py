"""`explorer run`: a complete explorer."""

from typing import TYPE_CHECKING

import click

from explorer_hooks.cli.options import checked_config
from syncd.jobfile.overrides import JobFileCommand, config_argument, overrides_argument, trust_option
from syncd.registered import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncd.jobfile.model import JobFile


@click.command(cls=JobFileCommand)
@config_argument(checked_config)
@overrides_argument
@trust_option
@click.option(
    "--name", metavar="NAME", show_default="explorer.name of CONFIG", help="The explorer's identity."
)
@click.option("--stage", metavar="NAME", help="Explore this one of the file's [[stages]], once it has begun.")
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Answer HTTP requests: 200 while the engine is ready, else 503. Without HOST on this host only.",
)
@click.option("--dry-run", is_flag=True, help="Check the file, print what was read, and change nothing.")
def run(
    config: str,
    overrides: tuple[str, ...],
    name: str | None,
    stage: str | None,
    health: str | None,
    dry_run: bool,
    trust: bool,
) -> None:
    """Explore as CONFIG says; --section.key value overrides any of its keys.

    Exits with 0 if the job is finished, the trainer is gone or all tasks are done, and on SIGTERM or Ctrl-C.

    \b
    Examples:
      explorer run grpo.toml --name e0
      explorer run grpo.toml --name e1 --explorer.engine.kind vllm --explorer.engine.address http://127.0.0.1:8000
      explorer run stages.toml --stage grpo --name e0
      explorer run grpo.toml --dry-run
    """  # noqa: D301 - click's mark is one backspace
    from explorer_hooks.run.load import load_file  # noqa: PLC0415
    from syncd.jobfile.code_trust import require_own_model  # noqa: PLC0415

    named = (*overrides, f"--explorer.name={name}") if name is not None else overrides
    file = load_file(config, named, stage, trust=trust)
    if dry_run:
        click.echo(file.model_dump_json(indent=2, include={"job", "model", "data", "sync", "explorer"}))
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
