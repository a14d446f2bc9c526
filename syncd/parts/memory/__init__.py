"""Weights through the memory of a host that trainer and explorer share.

    <memory_dir>/syncd.<job>-<hash>.<boot>/      mode 0700
      owner.lock                                 held by rank 0 of the trainer
      <step>-<attempt>/actor/...                 the files of one save, and the receipts of its writers
      <step>-<attempt>.lock                      shared by readers; exclusive for the process that removes the copy

The shards are written in the same pass as those of the job, so both have the digests of the receipts. Each rank
writes its receipt here before the one in the job: once the step is whole, so is its copy. A copy is never
announced: a reader looks for the attempt that the published manifest seals, and uses it only if directory, owner
and receipts fit.
"""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.parts.memory.send:MemorySender",
    receiver="syncd.parts.memory.receive:MemoryReceiver",
)
