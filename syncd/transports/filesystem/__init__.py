"""Weights through files: save (the trainer), load and stage (the explorer)."""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.transports.filesystem.send:FilesystemSender",
    receiver="syncd.transports.filesystem.receive:FilesystemReceiver",
)
