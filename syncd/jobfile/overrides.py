"""The command line of a program that reads a job's file: CONFIG, then `--section.key value`, and their completion."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from syncd.completion import matching
from syncd.console import UncheckedPath
from syncd.jobfile.code_trust import OPTION
from syncd.jobfile.keys import NAME, Keys

F = TypeVar("F", bound=Callable[..., Any])


class JobFileCommand(click.Command):
    """A command that takes a job's file and, after it, any key of it as an option.

    Args:
        names: Returns the names that a key with a text may have, such as those of installed engines.
    """

    def __init__(self, *args: Any, names: Callable[[str], Iterable[str]] = lambda _: (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._names = names
        self.context_settings["ignore_unknown_options"] = True

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        return [*super().shell_complete(ctx, incomplete), *matching(self._options().items(), incomplete)]

    def keys(self, incomplete: str) -> list[CompletionItem[str]]:
        plain = {name.removeprefix("--"): about for name, about in self._options().items()}
        return matching(plain.items(), incomplete)

    def values(self, key: str, incomplete: str) -> list[CompletionItem[str]]:
        keys = _keys()
        choices = (*keys.choices(key), *self._names(key)) if key in keys.all else ()
        return matching(choices, incomplete)

    def _options(self) -> Mapping[str, str]:
        keys = _keys().all.items()
        descriptions = {name: key.about for name, key in keys if "." in name and not key.is_repeated}
        return {f"--{name}": about for name, about in descriptions.items() if f".{NAME}." not in name}


def config_argument(command: F) -> F:
    """Add the argument CONFIG."""
    add = click.argument(
        "config",
        metavar="CONFIG",
        type=UncheckedPath(),
        callback=lambda _, __, value: check_file("CONFIG", value),
    )
    return add(command)


def check_file(name: str, value: str) -> str:
    """Return the path of a file that stands before `--section.key value`."""
    if not value or value.startswith("--"):
        raise click.BadParameter(f"{value!r} is not a file; {name} comes before --section.key value")
    return value


def overrides_argument(command: F) -> F:
    """Add `--section.key value`; the command's class is `JobFileCommand`."""
    add = click.argument(
        "overrides",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="[--SECTION.KEY VALUE]...",
        shell_complete=_values,
    )
    return add(command)


def trust_option(command: F) -> F:
    """Add `--trust-job-file` as `trust`."""
    text = "Run the code that CONFIG names even if it lies in a job and others could have written it."
    return click.option(OPTION, "trust", is_flag=True, help=text)(command)


def _keys() -> Keys:
    from syncd.jobfile.model import KEYS  # noqa: PLC0415 - pydantic is needed only for completion

    return KEYS


def _values(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    typed = ctx.params["overrides"]
    if not typed or not typed[-1].startswith("--") or not isinstance(ctx.command, JobFileCommand):
        return []
    return ctx.command.values(typed[-1].removeprefix("--"), incomplete)


def complete_key(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the keys that begin with what was typed, for an option that takes one."""
    return ctx.command.keys(incomplete) if isinstance(ctx.command, JobFileCommand) else []
