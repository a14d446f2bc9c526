"""Shell completion of the command lines `syncd`, `trainer` and `explorer`.

At each Tab the script that `--show-completion SHELL` prints calls the program again, with `_SYNCD_COMPLETE`,
`_TRAINER_COMPLETE` or `_EXPLORER_COMPLETE` set. The program prints completions or nothing, never an error. A thread
computes them; if a mount does not answer in time, the process ends and the shell gets nothing.
"""

import os
import sys
import threading
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

PATIENCE = 5.0  # seconds after which the shell gets nothing

_DONE, _UNKNOWN = 0, 1
_BREAKS = frozenset("=:")


def answer(group: click.Command, program: str, variable: str, instruction: str) -> int:
    """Print what a shell asks for, and return the exit code; end the process if that takes too long.

    Args:
        variable: The environment variable by which the shell asks.
        instruction: Its value, such as `bash_complete` or `bash_source`.
    """
    shell, _, what = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what not in ("complete", "source"):
        return _UNKNOWN
    completer = kind(group, {}, program, variable)
    if what == "source":
        click.echo(completer.source(), nl=False)
        return _DONE
    lines: list[str] = []
    thread = threading.Thread(target=_complete, args=(completer, shell, lines), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if lines:
        click.echo("\n".join(lines))
    if thread.is_alive():
        sys.stdout.flush()
        os._exit(_DONE)
    return _DONE


def matching(values: Iterable[str | tuple[str, str]], incomplete: str) -> list[CompletionItem[str]]:
    """Return the values that begin with what was typed; each may have a line of help."""
    pairs = [(value, None) if isinstance(value, str) else value for value in values]
    return [CompletionItem(value, help=about) for value, about in pairs if value.startswith(incomplete)]


def _complete(completer: ShellComplete, shell: str, lines: list[str]) -> None:
    """Add the completions; after an error nothing, because a message would be printed into the line being typed."""
    try:
        lines += _completions(completer, shell)
    except Exception:
        if os.environ.get("SYNCD_DEBUG", "0") not in ("", "0"):
            raise


def _completions(completer: ShellComplete, shell: str) -> list[str]:
    words, incomplete = completer.get_completion_args()
    if shell == "bash":
        *words, incomplete = _joined([*words, incomplete])
    if incomplete.startswith("--") and "=" in incomplete:
        name, _, incomplete = incomplete.partition("=")
        words.append(name)
    items = completer.get_completions(words, incomplete)
    return [completer.format_completion(item) for item in items]


def _joined(words: list[str]) -> list[str]:
    """Return words as they were typed: bash splits them at `=` and `:` (COMP_WORDBREAKS)."""
    joined, is_open = list[str](), False
    for word in words:
        is_break = bool(word) and set(word) <= _BREAKS
        if joined and (is_break or is_open):
            joined[-1] += word
        else:
            joined.append(word)
        is_open = is_break
    return joined
