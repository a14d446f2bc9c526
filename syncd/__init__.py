"""Filesystem-driven weight sync for RL post-training: protocol, daemon and client, free of torch."""

from syncd._version import __version__

__all__ = ["__version__"]
