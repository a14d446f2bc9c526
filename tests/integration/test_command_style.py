"""All commands of the three programs name values and show defaults in one style, which docs/commands.md describes."""

import re

import click
import pytest
from support.paths import ROOT

pytest.importorskip("pydantic", reason="two of the programs read a job's file")

from explorer_hooks.cli.main import explorer
from syncd.cli.main import syncd
from trainer.cli.main import trainer

PAGE = ROOT / "docs" / "commands.md"
BY_HAND = re.compile(
    r"\bdefaults?\b|unless given|\((?:\d[\d.]*|auto|info|keep|prune|header)\)", re.IGNORECASE
)


def commands(command, context):
    """Yield each command below one with its context, the first one too."""
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from commands(below, click.Context(below, context, name, **below.context_settings))


def parameters():
    """Return every argument and option of every command, with its place and context."""
    return [
        (f"{context.command_path} {param.name}", param, context)
        for program in (syncd, trainer, explorer)
        for command, context in commands(
            program, click.Context(program, None, program.name, **program.context_settings)
        )
        for param in command.params
    ]


def takes_a_value(param):
    return isinstance(param, click.Argument) or not (param.is_flag or param.count)


def named_values():
    """Return the names that the page gives to values, with the brackets of optional ones removed."""
    table = PAGE.read_text().split("\n## Names of values\n")[1].split("\n## ")[0]
    return [name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall("`(.+?)`", row)]


def test_each_value_has_a_name_that_the_page_explains():
    used = set()
    for place, param, _ in parameters():
        if takes_a_value(param) and not isinstance(param.type, click.Choice):
            assert param.metavar, f"{place} shows {type(param.type).__name__}"
            used.add(re.sub(r"^\[(\w+)\](\.{3})?$", r"\1", param.metavar))
    assert used == set(named_values())


def test_a_value_has_the_type_that_its_name_says():
    for place, param, _ in parameters():
        name, kind = (param.metavar or "").strip("[]"), param.type
        if name in ("DIR", "JOB", "OUT"):
            assert kind.name == "directory", place
        if name in ("FILE", "CONFIG"):
            assert kind.name == "path", place
        if name in ("N", "STEP", "PORT"):
            assert kind.name.startswith("integer"), place
        if name == "S":
            assert kind.name.startswith("float"), place


def test_each_default_is_shown_by_click_and_none_by_hand():
    for place, param, context in parameters():
        if not isinstance(param, click.Option) or param.hidden:
            continue
        assert not BY_HAND.search(param.help or ""), f"{place}: {param.help}"
        default = param.get_default(context)
        if isinstance(default, str | int | float) and default not in ("", False):
            assert "[default: " in param.get_help_record(context)[1], place
