"""The client that trainers and explorers use: status, waits, leases and state dicts over the files of a job.

No server and no actor stands between them: each process writes its own presence, the daemon writes the
version, and everybody reads. `Synchronizer` is for threads, `AsyncSynchronizer` has the same methods as
coroutines.
"""

from syncd.protocol.presence import RunningStatus
from syncd.synchronizer.blocking import Synchronizer
from syncd.synchronizer.coroutines import AsyncSynchronizer
from syncd.synchronizer.leasing import Leased
from syncd.synchronizer.payload import Tensor, TensorMeta
from syncd.synchronizer.styles import (
    SyncMethod,
    SyncStyle,
    explorer_needs_sync,
    should_load,
    trainer_needs_sync,
)

__all__ = [
    "AsyncSynchronizer",
    "Leased",
    "RunningStatus",
    "SyncMethod",
    "SyncStyle",
    "Synchronizer",
    "Tensor",
    "TensorMeta",
    "explorer_needs_sync",
    "should_load",
    "trainer_needs_sync",
]
