"""The packages that store and read deltas."""

from importlib.util import find_spec

_NEEDED = ("numpy", "pyarrow")


def missing_packages() -> list[str]:
    """Return the packages that deltas need and that are not installed."""
    return [name for name in _NEEDED if find_spec(name) is None]
