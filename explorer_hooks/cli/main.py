"""The entry point of `explorer`; torch is imported only once a verb runs."""

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from syncd import console
from syncd._version import __version__
from syncd.errors import DOCS

VERBS: Mapping[str, str] = {
    "run": "Generate and score responses to tasks, with the versions of a job.",
    "config": "Print the schema or the documentation of the keys that explorers read.",
}
"""The line of help of each verb; `explorer_hooks.cli.<verb>` defines the command, under the same name."""


@click.group(
    cls=console.LazyGroup,
    package="explorer_hooks.cli",
    verbs=VERBS,
    others="explorer.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog=f"\b\nExit codes and every command: {DOCS}/commands.md\nKeys: {DOCS}/configuration.md#explorer",
)
@click.version_option(__version__, prog_name="explorer")
@console.debug_option
@console.completion_option
def explorer(debug: bool) -> None:  # `debug` is read before anything is parsed
    r"""Generate experiences for a job with the versions that its trainer publishes.

    \b
    Examples:
      explorer run grpo.toml --dry-run
      explorer run grpo.toml --name e0
      eval "$(explorer --show-completion bash)"
    """


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    return console.run(explorer, "explorer", args)
