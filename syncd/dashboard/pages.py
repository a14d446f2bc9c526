"""What is answered to which path: the page's own files, read once, and the data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

_PLACE, _FIRST = "static", "page.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
DATA = "/data.json"

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With every answer. The page loads nothing but these files, and no other page gets at them."""


@dataclass(frozen=True, slots=True)
class Content:
    """A body and its media type."""

    body: bytes
    type: str


class Site:
    """Everything that there is to be asked for.

    Args:
        data: Returns the JSON text of `DATA`.
    """

    def __init__(self, data: Callable[[], str]) -> None:
        self._data = data
        self._files = _static()

    def at(self, path: str) -> Content | None:
        """Return what is at a path, None where there is nothing."""
        if path == DATA:
            return Content(self._data().encode("ascii"), "application/json")
        return self._files.get(path)


def _static() -> dict[str, Content]:
    """Return the page's own files by path."""
    found = {
        item.name: Content(item.read_bytes(), _TYPES[item.name.rpartition(".")[2]])
        for item in (files(__package__) / _PLACE).iterdir()
    }
    return {"/": found.pop(_FIRST), **{f"/{name}": content for name, content in found.items()}}
