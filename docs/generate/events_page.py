"""The table of docs/events.md: every event of the daemon, as `syncd/observe/event_names.py` describes it."""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping

_SAID = re.compile(r"(.*) \[([\w, ]+)(?:: (.+))?\]")


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    return {"names": "\n".join(["| event | level | when | fields |", "|---|---|---|---|", *_rows()])}


def _rows() -> Iterator[str]:
    from syncd.observe import event_names  # noqa: PLC0415 - found once `sys.path` has this checkout

    body = ast.parse(inspect.getsource(event_names)).body
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
            yield _row(str(node.value.value), _text(below))


def _text(node: ast.stmt) -> str:
    """Return the string that a statement is, on one line."""
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split())


def _row(name: str, said: str) -> str:
    match = _SAID.fullmatch(said)
    assert match, f"{name}: {said!r} does not end in [levels: fields]"
    when, levels, fields = match.groups()
    listed = ", ".join(f"`{field}`" for field in fields.split(", ")) if fields else ""
    return f"| `{name}` | {levels} | {when} | {listed} |"
