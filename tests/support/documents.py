"""Documents by their documented types: what `--json` prints and what the page's server answers."""

import sys
from collections.abc import Mapping
from typing import Any

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs" / "generate"))


def checked(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document after its type: each field is there, of its type, and no other.

    Args:
        name: The command, or the route.
        document: What it printed or answered.
    """
    from http_documents import ROUTES
    from json_documents import DOCUMENTS
    from program_documents import PROGRAMS
    from pydantic import TypeAdapter

    TypeAdapter({**DOCUMENTS, **PROGRAMS, **ROUTES}[name]).validate_python(document, strict=True)
    return document
