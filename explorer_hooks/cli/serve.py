"""`explorer serve`: an OpenAI-style endpoint that records what agents do."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from explorer_hooks.explorer.config import ExplorerFile


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", metavar="CONFIG")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
@click.option("--name", metavar="NAME", help="The explorer's identity; overrides explorer.name.")
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Answer HTTP requests: 200 while the engine is ready, else 503. Without HOST on this host only.",
)
@click.option("--dry-run", is_flag=True, help="Check the file, print what was read, and change nothing.")
def serve(
    config: str, overrides: tuple[str, ...], name: str | None, health: str | None, dry_run: bool
) -> None:
    """Serve agents as CONFIG says, and write what they do as experiences; --section.key value overrides any key.

    Exits with 0 if the job is finished or the trainer is gone, and on SIGTERM or Ctrl-C.

    \b
    Examples:
      explorer serve grpo.toml --name e0
      explorer serve grpo.toml --name e0 --explorer.gateway.listen 127.0.0.1:8100
      explorer serve grpo.toml --dry-run
    """  # noqa: D301 - click's mark is one backspace
    from explorer_hooks.explorer.load import load_served_file  # noqa: PLC0415

    if not config or config.startswith("--"):
        raise click.BadParameter(f"{config!r} is not a file; CONFIG comes before --section.key value")
    named = (*overrides, f"--explorer.name={name}") if name is not None else overrides
    file = load_served_file(config, named)
    if dry_run:
        click.echo(file.model_dump_json(indent=2, include={"job", "model", "data", "sync", "explorer"}))
        return
    click.echo(f"explorer ended: {gateway_function('serve', 'serve')(file, health)}", err=True)


def gateway_function(module: str, name: str) -> "Callable[[ExplorerFile, str | None], str]":
    """Return a function of the gateway, which needs what not everybody has.

    Raises:
        ConfigError: It is not installed.
    """
    import importlib  # noqa: PLC0415

    from syncd.errors import ConfigError  # noqa: PLC0415

    try:
        found = importlib.import_module(f"explorer_hooks.gateway.{module}")
    except ImportError as error:
        raise ConfigError(f"the gateway needs {error.name}", hint="pip install 'syncd[gateway]'") from error
    called: Callable[[ExplorerFile, str | None], str] = getattr(found, name)
    return called
