"""Labels: what an engine calls the weights that it runs."""

import hashlib
import re

from syncd.protocol.version import Pair

UNKNOWN = "unknown"
"""The label of weights that nobody can name: neither a version nor the weights that the engine started with."""

_CONTENT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LABEL = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})(?:\.[0-9a-f]{16}|\+[!-~]+)", re.ASCII)


def label_of(pair: Pair) -> str:
    """Return a pair as people read it, such as 2.120."""
    return f"{pair[0]}.{pair[1]}"


def engine_label(pair: Pair, digest: str) -> str:
    """Return a version as engines are told it, such as 2.120.0f1e2d3c4b5a6978: the pair and its content.

    Args:
        pair: The version's pair.
        digest: The digest of its manifest, or the fingerprint of a step that others wrote.
    """
    found = digest.rpartition(":")[2][:16]
    if not _CONTENT.fullmatch(found):
        found = hashlib.sha256(digest.encode()).hexdigest()[:16]
    return f"{label_of(pair)}.{found}"


def unpublished_label(pair: Pair, attempt: str) -> str:
    """Return what engines are told of weights that came by a broadcast, until their version is published.

    They have no manifest yet, so the attempt of the save that writes them to files names the content.
    """
    return f"{label_of(pair)}+{attempt}"


def is_unpublished(label: str) -> bool:
    """Say whether a label is of weights that came by a broadcast and were not published yet."""
    return "+" in label and pair_of(label) is not None


def pair_of(label: str | None) -> Pair | None:
    """Return the pair of a label that names content, None of anything else: of a bare 2.120 too."""
    found = _LABEL.fullmatch(label or "")
    return (int(found[1]), int(found[2])) if found else None
