"""The entry point of `syncd`."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from syncd import console
from syncd._version import __version__
from syncd.errors import DOCS
from syncd.trainer_program import prefer_own_trainer

VERBS: Mapping[str, str] = {
    "init": "Write the files of a new job: job file, sbatch files, reward.",
    "watch": "Run the daemon: detect new steps, publish versions, prune.",
    "status": "Show what is published, who follows it, and what is wrong.",
    "ls": "List the steps of a job and the rule that keeps each.",
    "verify": "Check a step: structure, sizes, headers, or every byte.",
    "wait": "Wait for a version that is newer than a given one.",
    "publish": "Publish a directory of safetensors as a step.",
    "materialise": "Write a step, also a delta, as a whole model directory.",
    "pin": "Keep a step until it is unpinned.",
    "unpin": "Remove the pin of a step.",
    "prune": "Remove the steps that retention does not keep, once.",
    "rollback": "Roll explorers back to a step.",
    "install-units": "Write systemd units for this installation.",
}
"""Each verb with its line of help. The command is in `syncd.cli.<verb>` under the same name, with `_` for `-`."""


def _epilog() -> str:
    """Return what `--help` ends with: the addresses of pages, and the directory of this machine that has them too."""
    text = f"\b\nExit codes and every command: {DOCS}/commands.md"
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for directory in (f"{sys.prefix}/share/doc/syncd", f"{source}/docs"):
        if os.path.isfile(f"{directory}/commands.md"):
            return f"{text}\nWithout network: {directory}/commands.md"
    return text


@click.group(
    cls=console.LazyGroup,
    package="syncd.cli",
    verbs=VERBS,
    others="syncd.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog=_epilog(),
)
@click.version_option(__version__, prog_name="syncd")
@console.debug_option
@console.completion_option
def syncd(debug: bool) -> None:  # `debug` is read before anything is parsed
    r"""Sync weights from a trainer to explorers over a shared file system.

    \b
    Examples:
      syncd watch /ckpt/job
      syncd status /ckpt/job --watch
      eval "$(syncd --show-completion bash)"
    """


def main() -> NoReturn:
    prefer_own_trainer()
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    return console.run(syncd, "syncd", args)
