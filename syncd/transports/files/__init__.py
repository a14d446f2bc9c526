"""Weights through files: save (the trainer), load and stage (the explorer)."""

from syncd.transports.base import Transport

TRANSPORT = Transport(
    sender="syncd.transports.files.send:FilesSender",
    receiver="syncd.transports.files.receive:FilesReceiver",
)
