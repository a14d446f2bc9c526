"""Weights through a broadcast: control plane, process group, both ends."""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.transports.broadcast.send:BroadcastSender",
    receiver="syncd.transports.broadcast.receive:BroadcastReceiver",
    yields="tensors",
)
