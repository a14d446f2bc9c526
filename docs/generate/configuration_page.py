"""The tables of docs/configuration.md: every key of every table of a job file."""

import re
from collections.abc import Mapping

_PAGE = re.compile(r"\b(?:docs/)?([\w-]+\.md)\b")


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    from syncd.jobfile.model import KEYS  # noqa: PLC0415 - found once `sys.path` has this checkout

    return {"keys": _PAGE.sub(r"[\1](\1)", KEYS.documentation())}
