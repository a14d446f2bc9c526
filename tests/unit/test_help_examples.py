"""Each example of `--help` is a command line that its program takes: verbs, options, values, and keys of the file."""

import contextlib
import re
import shlex
import sys

import click
import pytest
from support.paths import ROOT

pytest.importorskip("pydantic", reason="two of the programs read a job's file")

from syncd.jobfile.model import KEYS

sys.path.insert(0, str(ROOT / "docs" / "generate"))
import commands_page

PROGRAMS = commands_page.groups()
_COMMAND = re.compile(r"(?:^|&& |\$\(|--no-python |srun )((?:syncd|trainer|explorer) [^|>;)&]*)")
NO_CODES = {"syncd ls", "syncd unpin", "trainer stages", "trainer plot", "explorer serve"}
"""Commands that end with codes that every command has, or that say whose they have."""


def commands(command, context):
    """Yield the path of a command and of each one below it, with its help."""
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from commands(below, click.Context(below, info_name=name, parent=context))


COMMANDS = dict(
    pair for name, group in PROGRAMS.items() for pair in commands(group, click.Context(group, info_name=name))
)


def examples(command):
    """Return the command lines of our programs in the examples of a command."""
    text = re.split(r"Examples?:\n", command.help or "")[-1]
    return [line for row in text.splitlines() for line in _COMMAND.findall(row.strip())]


def parse(line):
    """Have the programs parse a command line without running it, and return the keys of the file that it gives."""
    program, *words = shlex.split(re.sub(r"\s+\(at about .*", "", line).replace("$seen", "1.2"))
    command, context = PROGRAMS[program], click.Context(PROGRAMS[program], info_name=program)
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0))
        assert command is not None, line
    with contextlib.suppress(
        click.exceptions.Exit
    ):  # of an option that answers at once, such as --show-completion
        return command.make_context(command.name, list(words)).params.get("overrides") or ()
    return ()


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_has_an_example_that_it_takes(path):
    lines = examples(COMMANDS[path])
    assert any(line.startswith(path) for line in lines), f"{path} has no example of itself"
    for line in lines:
        for word in parse(line):
            if word.startswith("--"):
                assert word[2:].partition("=")[0] in KEYS.all, line


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_that_works_says_its_exit_codes(path):
    text = COMMANDS[path].help or ""
    is_reading = " config" in path or " " not in path
    assert ("Exit codes:\n" in text) != (is_reading or path in NO_CODES), path


def test_an_example_that_is_wrong_is_found():
    with pytest.raises(click.UsageError):
        parse("syncd ls /ckpt/job --keep-lots 3")
    assert parse("trainer train grpo.toml --no.key 3")[0] == "--no.key"
