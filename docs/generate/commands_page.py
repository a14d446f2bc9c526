"""The commands of docs/commands.md: all of the three programs with their options, as click knows them.

The text is that of `--help`. The width of a terminal and the language of the machine make no difference.
"""

import html
import inspect
from collections.abc import Iterator, Mapping, Sequence

import click


def groups() -> dict[str, click.Group]:
    """Return the three programs by name."""
    from explorer_hooks.cli.main import explorer  # noqa: PLC0415 - found once `sys.path` has this checkout
    from syncd.cli.main import syncd  # noqa: PLC0415
    from trainer.cli.main import trainer  # noqa: PLC0415

    return {"syncd": syncd, "trainer": trainer, "explorer": explorer}


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    return {"programs": "".join(text for name, group in groups().items() for text in _program(name, group))}


def _program(name: str, group: click.Group) -> Iterator[str]:
    yield f"\n## {name}\n"
    yield from _of(group, click.Context(group, info_name=name, **group.context_settings))


def _of(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the parts of one command, then those of its own commands."""
    if context.parent is not None:
        yield f"\n### {context.command_path}\n"
    yield f"\n    {context.command_path} {' '.join(command.collect_usage_pieces(context))}\n"
    yield _prose(command.help or "")
    yield _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield from _of(found, click.Context(found, info_name=name, parent=context))


def _prose(text: str) -> str:
    """Return a help text in Markdown: what must not be wrapped becomes code."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "".join(f"\n{_paragraph(paragraph)}\n" for paragraph in paragraphs if paragraph.strip())


def _paragraph(text: str) -> str:
    """Return one paragraph; after click's mark come a line that ends in a colon, and lines of code."""
    if not text.startswith("\b"):
        return text.strip()
    first, *lines = text.removeprefix("\b").lstrip("\n").splitlines()
    if first == "Exit codes:":
        return _exit_codes(lines)
    if not first.endswith(":"):
        first, lines = "", [first, *lines]
    code = "\n".join(f"    {line.strip()}" for line in lines)
    return f"{first}\n\n{code}" if first else code


def _exit_codes(lines: Sequence[str]) -> str:
    rows = [f"| {code} | {_cell(text)} |" for code, text in (line.split(maxsplit=1) for line in lines)]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows])


def _options(command: click.Command, context: click.Context) -> str:
    """Return the table of a command's options, empty if it has none but `--help`."""
    records = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    rows = [f"| <code>{_cell(left)}</code> | {_cell(right)} |\n" for left, right in filter(None, records)]
    return "\n".join(["", "| option | meaning |", "|---|---|", "".join(rows)]) if rows else ""


def _cell(text: str) -> str:
    """Return a text for a cell of a table: viewers differ in how they read an escaped bar, and agree on this one."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
