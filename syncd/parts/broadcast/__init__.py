"""Weights through a broadcast: control plane, process group, both ends.

1. Agree: rank 0 waits until each living member asks, at most `sync.ready_timeout`. The trainer alone decides: it
   writes the step and each member's ask into its own presence, and a member takes part if that record names its
   present ask.
2. Group: kept if members, tensors and backend are the same; else a new epoch is offered, and members join what a
   living trainer names.
3. Round: step, attempt, epoch, digest of the layout and probe, in the trainer's presence.
4. Send: the next bucket is prepared while one is sent; a member receives into memory beside its parameters.
5. Confirm: each member writes the checksum of what it has received.
6. Commit: the trainer writes `committed`; only now a member gives what it has received to its parameters.
7. Files: the step of this attempt is saved, whatever became of the broadcast.

2 to 6 share one deadline, `sync.broadcast_timeout`. Whatever fails on any side, that side aborts its group, and the
step goes through files. A member is ahead until the daemon publishes that step with that very attempt; then it
confirms the pair without a load. If another attempt is published, it loads the files. After the n-th failure in a
row 2^(n-1) - 1 syncs go through files alone, 63 at most. A member that was late n times in a row is
not waited for in the next 2^n - 1 syncs, 63 at most, unless it asks.
"""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.parts.broadcast.send:BroadcastSender",
    receiver="syncd.parts.broadcast.receive:BroadcastReceiver",
    source="explorer_hooks.parts.broadcast.source:BroadcastSource",
)
