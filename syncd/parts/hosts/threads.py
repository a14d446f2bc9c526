"""Starting threads where a host may have no more of them."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from syncd.errors import StorageError


@contextlib.contextmanager
def thread_shortage_passes() -> Iterator[None]:
    """Raise an error that passes where a thread cannot start."""
    try:
        yield
    except RuntimeError as error:
        raise StorageError(f"cannot read together: {error}", hint="ulimit -u") from error


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that does not keep the process."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with thread_shortage_passes():
        thread.start()
    return thread
