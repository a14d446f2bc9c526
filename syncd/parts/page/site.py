"""What the server answers at each path: the page's own files, and routes that answer with a JSON document."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

Query = Mapping[str, str]  # the parameters of a request; of one that is given twice, the last

Route = Callable[[Query], Mapping[str, Any] | None]
"""Returns the document of a request, None if there is nothing."""

PAGE = "page.html"
_STATIC = "static"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageContent:
    body: bytes
    type: str


class Site(Protocol):
    """Everything that a server can be asked for."""

    def at(self, path: str, query: Query) -> PageContent | None:
        """Return what is at a path that begins with a slash, None where there is nothing."""


class JobSite:
    """The page of one job. Its files name each other relatively, so that it may be below any path."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes, self._files = routes, static_files(PAGE)

    def at(self, path: str, query: Query) -> PageContent | None:
        route = self._routes.get(path)
        return as_json(route(query)) if route is not None else self._files.get(path)


def as_json(document: Mapping[str, Any] | None) -> PageContent | None:
    if document is None:
        return None
    return PageContent(json.dumps(document, allow_nan=False).encode("ascii"), "application/json")


def static_files(first: str) -> dict[str, PageContent]:
    """Return the page's own files by path; the one named `first` is at `/`."""
    contents = {
        item.name: PageContent(item.read_bytes(), _TYPES[item.name.rpartition(".")[2]])
        for item in (files(__package__) / _STATIC).iterdir()
    }
    others = {f"/{name}": content for name, content in contents.items() if not name.endswith(".html")}
    return {"/": contents[first], **others}
