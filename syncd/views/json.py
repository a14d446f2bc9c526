"""Documents as JSON text. docs/json.md is the contract."""

import json
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1
"""Grows when a documented field changes its meaning or goes; new fields may come without."""


def text(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **document}, allow_nan=False)
