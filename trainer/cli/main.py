"""The entry point of `trainer`; torch is imported only once a verb trains."""

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from syncd import console
from syncd._version import __version__
from syncd.errors import DOCS

VERBS: Mapping[str, str] = {
    "train": "Train: consume experiences, write steps.",
    "stages": "Train the stages of one file, one after the other.",
    "config": "Print the schema and the documentation of the file, and the algorithms.",
    "export": "Make a Hugging Face directory of a step or full checkpoint.",
}
"""Each verb with its line of help. `trainer.cli.<verb>` has the command, under its name."""


@click.group(
    cls=console.LazyGroup,
    package="trainer.cli",
    verbs=VERBS,
    others="trainer.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog=f"\b\nExit codes and every command: {DOCS}/commands.md\nKeys of the file: {DOCS}/configuration.md",
)
@click.version_option(__version__, prog_name="trainer")
@console.debug_option
@console.completion_option
def trainer(debug: bool) -> None:  # `debug` is read before anything is parsed
    r"""Train a model on the experiences of a job, and write its weights as steps.

    \b
    Examples:
      trainer train grpo.toml --dry-run
      trainer train grpo.toml
      eval "$(trainer --show-completion bash)"
    """


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    return console.run(trainer, "trainer", args)
