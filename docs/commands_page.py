"""Writes docs/commands.md: every command of the three programs with its options, as click knows them.

    python docs/commands_page.py            # writes the page
    python docs/commands_page.py --check    # exits with 1 if the page is out of date

The text is that of `--help`. The width of a terminal and the language of the machine make no difference.
"""

import html
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "commands.md"
COMMAND = "python docs/commands_page.py"

_HEAD = f"""# Commands and options

Every command of `syncd`, `trainer` and `explorer`, as its `--help` prints it. `{COMMAND}` writes this page.
What the commands of `syncd` mean, and exit codes: [cli.md](cli.md). Options that every command has: `-h`, `--help`.
"""


def groups() -> dict[str, click.Group]:
    """Return the three programs by name."""
    from explorer_hooks.cli.main import explorer  # noqa: PLC0415 - found once `sys.path` has this checkout
    from syncd.cli.main import syncd  # noqa: PLC0415
    from trainer.cli.main import trainer  # noqa: PLC0415

    return {"syncd": syncd, "trainer": trainer, "explorer": explorer}


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for name, group in groups().items():
        parts.append(f"\n## {name}\n")
        parts += _of(group, click.Context(group, info_name=name))
    return "".join(parts)


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
    if not first.endswith(":"):
        first, lines = "", [first, *lines]
    code = "\n".join(f"    {line.strip()}" for line in lines)
    return f"{first}\n\n{code}" if first else code


def _options(command: click.Command, context: click.Context) -> str:
    """Return the table of a command's options, empty if it has none but `--help`."""
    records = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    rows = [f"| <code>{_cell(left)}</code> | {_cell(right)} |\n" for left, right in filter(None, records)]
    return "\n".join(["", "| option | meaning |", "|---|---|", "".join(rows)]) if rows else ""


def _cell(text: str) -> str:
    """Return a text for a cell of a table: viewers differ in how they read an escaped bar, and agree on this one."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;")


def main() -> int:
    """Write or check the page, and return the exit code."""
    sys.path.insert(0, str(ROOT))
    text = page()
    if sys.argv[1:] == ["--check"]:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
