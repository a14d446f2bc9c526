"""Weights through a broadcast: control plane, process group, both ends."""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.parts.broadcast.send:BroadcastSender",
    receiver="syncd.parts.broadcast.receive:BroadcastReceiver",
    source="explorer_hooks.parts.broadcast.source:BroadcastSource",
)
