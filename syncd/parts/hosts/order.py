"""Which host reads which piece: pure, and the same on every host that has the same list."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet


def order_of(number: int, members: Sequence[str]) -> list[str]:
    """Return the hosts in the order in which they are responsible for a piece.

    They take turns, so all have the same number of pieces. A jump that changes from round to round spreads the pieces
    of a host that is lost over all others.

    Args:
        members: The hosts, sorted.
    """
    count = len(members)
    if count < 2:  # noqa: PLR2004 - one host has no next
        return list(members)
    jump = 1 + (number // count) % (count - 1)
    jumped = (members[(number + rank * jump) % count] for rank in range(count))
    rest = (members[(number + rank) % count] for rank in range(count))
    return list(dict.fromkeys((*jumped, *rest)))


def next_host(
    number: int, members: Sequence[str], removed: AbstractSet[str], vain: AbstractSet[str], most: int
) -> str | None:
    """Return the host to ask for a piece, None for the file system.

    Args:
        removed: The hosts that are asked nothing more.
        vain: The hosts that were asked for it in vain.
        most: How many are asked before the file system.
    """
    if len(vain - removed) >= most:
        return None
    return next((host for host in order_of(number, members) if host not in removed | vain), None)
