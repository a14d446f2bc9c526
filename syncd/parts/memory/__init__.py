"""Weights through the memory of a host that trainer and explorer share."""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.parts.memory.send:MemorySender",
    receiver="syncd.parts.memory.receive:MemoryReceiver",
)
