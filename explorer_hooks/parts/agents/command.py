"""`explorer serve`: record what agents do behind an OpenAI-style endpoint, as experiences."""

from typing import TYPE_CHECKING

import click

from explorer_hooks.cli.options import explorer_command, named, show
from syncd.extras import install_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncd.jobfile.model import JobFile

AFTER = "run"  # the verb behind which `--help` lists this one


@explorer_command
def serve(
    config: str,
    overrides: tuple[str, ...],
    name: str | None,
    health: str | None,
    dry_run: bool,
    trust: bool,
) -> None:
    r"""Serve agents as CONFIG says, by an OpenAI-style endpoint, and record what they do as experiences.

    --section.key value overrides any key of CONFIG. Exit codes are those of `explorer run`.

    \b
    Examples:
      explorer serve grpo.toml --name e0
      explorer serve grpo.toml --name e0 --explorer.gateway.listen 127.0.0.1:8100
      explorer serve grpo.toml --dry-run
    """
    from explorer_hooks.parts.agents.load import load_served_file  # noqa: PLC0415
    from syncd.jobfile.code_trust import require_own_model  # noqa: PLC0415

    file = load_served_file(config, named(overrides, name), trust=trust)
    if dry_run:
        show(file)
        return
    require_own_model(file.model.path, runs_code=file.model.trust_remote_code and not trust)
    click.echo(f"explorer ended: {_gateway_function('serve', 'serve')(file, health)}", err=True)


def run_agents(file: "JobFile", health: str | None) -> str:
    """Have agents play the tasks of a file with [explorer.agent], and return why that ended."""
    return _gateway_function("run_agents", "run_agents")(file, health)


def _gateway_function(module: str, name: str) -> "Callable[[JobFile, str | None], str]":
    """Return a function of the gateway, which needs what not everybody has."""
    import importlib  # noqa: PLC0415

    from syncd.errors import ConfigError  # noqa: PLC0415

    try:
        loaded = importlib.import_module(f"explorer_hooks.parts.agents.{module}")
    except ImportError as error:
        raise ConfigError(f"the gateway needs {error.name}", hint=install_command("gateway")) from error
    called: Callable[[JobFile, str | None], str] = getattr(loaded, name)
    return called
