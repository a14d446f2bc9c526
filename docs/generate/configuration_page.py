"""The tables of docs/configuration.md: every key of every table of a job's file."""

from collections.abc import Mapping


def parts() -> Mapping[str, str]:
    """Return the parts of the page by name."""
    from syncd.jobfile.model import KEYS  # noqa: PLC0415 - found once `sys.path` has this checkout

    return {"keys": KEYS.documentation()}
