"""The thread that keeps a presence alive, and leases of a process that takes no part in the job."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Collection, Iterator

from syncd.client.own_presence import OwnPresence
from syncd.errors import storage_errors
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import HEARTBEAT, RunningStatus, path_of


class Heartbeat:
    """A thread that calls `beat`, which must not raise, at intervals of `every` seconds until it is stopped."""

    def __init__(self, beat: Callable[[], None], every: float) -> None:
        self._beat, self._every = beat, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncd-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a call that is running."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(HEARTBEAT)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._beat()


@contextlib.contextmanager
def leasing(job: Job, steps: Collection[int]) -> Iterator[None]:
    """Keep steps from being removed while a tool reads them.

    Read their manifests only inside of the block: a step may have gone before.
    """
    with reading(job) as own, own.leasing(steps):
        yield


@contextlib.contextmanager
def reading(job: Job, kind: str = "reading") -> Iterator[OwnPresence]:
    """Publish a process that leases steps without a part in the job: nobody waits for it.

    Its presence is that of an explorer that has stopped, whose leases count as long as it beats. It is removed with
    the end of the block. After a kill the leases end as those of any process, and the daemon removes the file.
    """
    name = f"{kind}-{uuid.uuid4().hex[:12]}"
    own = OwnPresence(job.disk, SystemClock(), job.explorers, name, status=RunningStatus.STOPPED)

    def beat() -> None:
        with contextlib.suppress(KeyboardInterrupt):  # it cancels the next call of each thread
            own.beat()

    with contextlib.ExitStack() as end:
        end.callback(_remove, job, name)
        with storage_errors(job.explorers):
            own.join()
        end.callback(Heartbeat(beat, HEARTBEAT / 5).stop)
        yield own


def _remove(job: Job, name: str) -> None:
    with contextlib.suppress(OSError):
        job.disk.unlink(path_of(job.explorers, name))
