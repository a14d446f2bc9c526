"""`explorer run`: a complete explorer."""

import click

from explorer_hooks.cli.serve import checked_config, gateway_function
from syncd.jobfile.overrides import JobFileCommand, config_argument, overrides_argument, trust_option


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
    from syncd.jobfile.trust import require_own_model  # noqa: PLC0415

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
    if file.explorer.agent.is_given:
        ended = gateway_function("run_agents", "run_agents")(file, health)
    else:
        from explorer_hooks.run.run import run as explore  # noqa: PLC0415

        ended = explore(file, health)
    click.echo(f"explorer ended: {ended}", err=True)
