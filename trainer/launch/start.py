"""Starts the ranks of this machine.

Rank 0 has our terminal. What the others print comes line by line to our stderr. Ranks meet at a socket that
listens before the first of them starts and that rank 0 takes over, so no port can be lost to somebody else.
"""

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from trainer.launch.machine import settings
from trainer.launch.rank_env import Place
from trainer.launch.signals import Inbox
from trainer.launch.supervisor import Crew

GRACE = 30.0
"""Seconds between the request to end and SIGKILL, for ranks that are left when one has failed."""

_BACKLOG = 1024


def start_ranks(
    command: Sequence[str], nproc: int, environ: Mapping[str, str], *, grace: float = GRACE
) -> int:
    """Run a command as ranks 0 to nproc - 1 of this machine, and return the exit code of them all.

    Args:
        command: What each rank runs; `place_from` tells it which one it is.
        nproc: How many ranks.
        environ: The environment they start from.
        grace: Seconds that ranks have to end when one of them has failed.

    Returns:
        The code of the first rank that failed, 128 + n where signal n killed it; else 75 if one was asked to
        stop, else 0.
    """
    with Inbox() as inbox, Crew(inbox, grace) as crew:
        with _meeting_point() as listener:
            port = listener.getsockname()[1]
            for rank in range(nproc):
                place = Place(rank, rank, nproc, nproc, "127.0.0.1", port, "trainer")
                crew.start(command, place, {**environ, **settings(nproc, environ)}, listener)
        return crew.wait()


@contextlib.contextmanager
def _meeting_point() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        yield listener
