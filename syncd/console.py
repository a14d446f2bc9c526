"""What all command lines share: verbs that are imported on use, and errors as one line and an exit code.

Before a verb is chosen only click is imported, so that help and completion are fast.
"""

import ast
import contextlib
import errno
import functools
import importlib
import io
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from syncd.errors import TROUBLESHOOTING, StorageError, SyncdError, plain, storage_error, unexpected
from syncd.registered import registered

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from click.shell_completion import CompletionItem

INTERRUPTED = 130
CLOSED_PIPE = 141
_USAGE = 2
_LAYOUT = "\n\t"
_MOST = 1 << 53
_MOST_SECONDS = 1e9  # the limit of numbers with a fraction: all of them are seconds

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_HINTS = {errno.ENOSPC: "df -h {path}", errno.EDQUOT: "quota -s", errno.EROFS: "findmnt -T {path}"}

debug_option = click.option(
    "--debug", is_flag=True, help="Show a traceback when something fails; the same as SYNCD_DEBUG=1."
)
"""`run` reads it before anything is parsed."""


SHELLS = ("bash", "zsh", "fish")


def _show_completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        from syncd.completion import answer  # noqa: PLC0415 - once in the life of a shell

        program = str(ctx.info_name)
        ctx.exit(answer(ctx.command, program, _completion_variable(program), f"{shell}_source"))


def _completion_variable(program: str) -> str:
    return f"_{program.upper()}_COMPLETE"


completion_option = click.option(
    "--show-completion",
    type=click.Choice(SHELLS),
    expose_value=False,
    is_eager=True,
    callback=_show_completion,
    help="Print the completion script of a shell.",
)


class UncheckedPath(click.Path):
    """A path that is not accessed while the command line is parsed: its mount may not answer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        return value


class LazyGroup(click.Group):
    """A group that imports a command when it is chosen.

    Args:
        package: The package of the commands: `<package>.<verb>` has one under its name, with `_` for `-`.
        verbs: Each verb with its line of help.
        others: The group of entry points by which parts and other packages add verbs: name and command. The module
            of a command says in the first line of its docstring, behind a colon, what `--help` says of the verb, and
            may name in `AFTER` the verb behind which it is listed.
    """

    def __init__(
        self, *, package: str, verbs: Mapping[str, str], others: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.package, self.own = package, verbs
        self._others = others
        unescape(self)

    @functools.cached_property
    def others(self) -> Mapping[str, "EntryPoint"]:
        """Return the verbs of parts and other packages; they are not imported yet."""
        if self._others is None:
            return {}
        return {name: point for name, point in registered(self._others).items() if name not in self.own}

    @functools.cached_property
    def verbs(self) -> Mapping[str, str]:
        """Return each verb with its line of help, in the order of `--help`."""
        lines = list(self.own.items())
        for name, point in self.others.items():
            line, after = _said_of_command(point.module)
            index = next((index for index, (verb, _) in enumerate(lines, 1) if verb == after), len(lines))
            lines.insert(index, (name, line))
        return dict(lines)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name in self.own:
            name = cmd_name.replace("-", "_")
            command = getattr(importlib.import_module(f"{self.package}.{name}"), name)
        elif cmd_name in self.others:
            command = self.others[cmd_name].load()
        else:
            return None
        return guard(unescape(command)) if isinstance(command, click.Command) else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["CompletionItem[str]"]:
        """Return the verbs that begin with what was typed without importing them; options as click has them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from syncd.completion import matching  # noqa: PLC0415 - only a shell asks for it

        return matching(self.verbs.items(), incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.verbs.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Finding the verbs of other packages takes longer than anything else here.
        if (
            name not in self.own
            and name not in self.verbs
            and not name.startswith("-")
            and not ctx.resilient_parsing
        ):
            import difflib  # noqa: PLC0415 - only a misspelt verb needs it

            near = difflib.get_close_matches(name, self.verbs, 1)
            ctx.fail(f"there is no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


def _said_of_command(module: str) -> tuple[str, str]:
    """Return a module's line of help and its `AFTER`, both empty if it has none, without importing the module."""
    from importlib.util import find_spec  # noqa: PLC0415

    try:
        spec = find_spec(module)
        with open(spec.origin if spec and spec.origin else os.devnull, "rb") as file:
            tree = ast.parse(file.read())
    except (ImportError, OSError, SyntaxError):
        return "", ""
    line = (ast.get_docstring(tree) or "").partition("\n")[0]
    line = line.partition(": ")[2] or line
    return line[:1].upper() + line[1:], _text_assigned(tree, "AFTER")


def _text_assigned(tree: ast.Module, name: str) -> str:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(text))) if (
                target == name
            ):
                return text
    return ""


def unescape(command: click.Command) -> click.Command:
    """Return a command with click's mark against wrapping restored: in a raw docstring it is two characters."""
    command.help = (command.help or "").replace("\\b\n", "\b\n")
    for below in getattr(command, "commands", {}).values():
        unescape(below)
    return command


def guard(command: click.Command) -> click.Command:
    """Return a command that refuses invalid values of all its parameters as wrong usage."""
    for param in command.params:
        if getattr(param.callback, "func", None) is not _checked:
            param.callback = functools.partial(_checked, param.callback)
    return command


def _checked(
    callback: Callable[..., Any] | None, ctx: click.Context, param: click.Parameter, value: Any
) -> Any:
    """Return the value of a parameter, as its own callback has it; refuse one that is invalid for every command."""
    for part in value if isinstance(value, tuple) else (value,):
        if problem := _problem(part, is_path=isinstance(param.type, click.Path)):
            raise click.BadParameter(problem, ctx, param)
    return callback(ctx, param, value) if callback else value


def _problem(value: object, *, is_path: bool) -> str:
    """Return why a value is invalid for every command, empty if it is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if isinstance(value, float | int) and abs(value) > (_MOST_SECONDS if type(value) is float else _MOST):
        return "the number is too large"
    if not isinstance(value, str):
        return ""
    if is_path and not value:
        return "it is empty; is a shell variable unset?"
    if "\0" in value:
        return "it holds a NUL character"
    is_text = not any("\ud800" <= letter <= "\udfff" for letter in value)
    return "" if is_path or is_text else "it is not UTF-8"


def run(group: click.Group, program: str, args: Sequence[str]) -> int:
    _prepare_streams()
    try:
        code = _invoke(group, program, list(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as `head` does. That is no error, and the flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # as in `print_error`
            error.show()
        return _USAGE
    except Exception as error:  # noqa: BLE001 - the last line of defence
        return _report(error, program, args)
    return code


def _prepare_streams() -> None:
    """Open the standard streams that this process was started without, on /dev/null.

    Their descriptors must be taken, so that no file of a job becomes the standard output of a child process. What the
    encoding of a stream lacks is spelt out: a name of a job may hold any character.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number and not _is_open(number):
                os.dup2(descriptor, number)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _invoke(group: click.Group, program: str, args: list[str]) -> int:
    variable = _completion_variable(program)
    if instruction := os.environ.get(variable):
        from syncd.completion import answer  # noqa: PLC0415 - only a shell asks for it

        return answer(group, program, variable, instruction)
    try:
        with group.make_context(program, args) as context:
            group.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0


def _report(error: Exception, program: str, args: Sequence[str]) -> int:
    if _is_debugging(args):
        import traceback  # noqa: PLC0415

        traceback.print_exception(error)
    reported = _as_syncd_error(error, program, args)
    print_error(reported)
    return reported.exit_code


def print_error(error: SyncdError) -> None:
    """Print an error and its hint to stderr, on a terminal in colors unless NO_COLOR is set.

    The hint of an error without one is the entry of its exit code in the documentation.
    """
    hint = error.hint or f"see {TROUBLESHOOTING}#exit-code-{error.exit_code}"
    # The disk of the log may be full: the exit code must still be the documented one.
    with contextlib.suppress(OSError):
        click.echo(f"{_word('error:', 'red')} {plain(str(error), _LAYOUT)}", err=True)
        click.echo(f"{_word('hint:', 'cyan')} {plain(hint, _LAYOUT)}", err=True)


def _word(text: str, colour: str) -> str:
    """Return a coloured word; click takes the colour away where stderr is no terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour, bold=True)


def _as_syncd_error(error: Exception, program: str, args: Sequence[str]) -> SyncdError:
    if isinstance(error, StorageError) and error.hint is None and error.path and error.errno in _HINTS:
        error.hint = _hint_for(error.errno, error.path)
    if isinstance(error, SyncdError):
        return error
    if isinstance(error, ModuleNotFoundError):
        from syncd.extras import not_installed  # noqa: PLC0415 - only a failed import needs it

        if (missing := not_installed(error, program)) is not None:
            return missing
    if isinstance(error, OSError):
        reported: SyncdError = storage_error(error, None)
        reported.hint = _hint(error)
        return reported
    return unexpected(error, program, f"report what this prints: {shlex.join([program, '--debug', *args])}")


def _hint(error: OSError) -> str | None:
    path = error.filename
    if not isinstance(path, str):
        return None
    return _hint_for(error.errno, path)


def _hint_for(number: int | None, path: str) -> str:
    there = path if os.path.lexists(path) else os.path.dirname(path) or "."
    return _HINTS.get(number or 0, "ls -ld {path}").format(path=shlex.quote(there))


def _is_debugging(args: Sequence[str]) -> bool:
    options = takewhile(lambda argument: argument.startswith("-"), args)
    return os.environ.get("SYNCD_DEBUG", "0") not in ("", "0") or "--debug" in options
