"""Rendezvous files of a broadcast group: `rendezvous/<group>/<epoch>/`.

The trainer posts an offer; each explorer posts that it has joined, then that it has received, then that it
has left. An offer holds an address, a port and a secret: only the trainer's user may read it.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from syncd.errors import CorruptDataError
from syncd.protocol.backend import GLOO
from syncd.protocol.disk import MISSING, list_if_there, remove_tree
from syncd.protocol.documents import (
    SMALL_LIMIT,
    Fields,
    as_document,
    list_documents,
    read_document,
    record_from,
    write_document,
)
from syncd.protocol.layout import Job, check_identity, is_identity

STATES = ("joined", "received", "failed", "left")

_OFFER = "offer.json"

TensorInfo = tuple[str, str, tuple[int, ...]]  # (name, dtype, shape) of one tensor


@dataclass(frozen=True, slots=True)
class Offer:
    """What the trainer posts to form a group."""

    group: str  # name of the group
    epoch: int  # grows each time the group is formed again
    address: str  # the address of the group's store
    port: int
    backend: str  # nccl or gloo; gloo in documents that do not name it
    world_size: int  # members, the trainer included
    members: tuple[str, ...]  # the explorers it is for; rank = index + 1
    tensors: tuple[TensorInfo, ...] = ()  # name, dtype and shape of each tensor in the order of sending
    bucket: int = 0  # bytes that are sent at once
    secret: str = field(default="", repr=False)  # the prefix of the keys in the group's store


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    member: str  # the explorer
    state: str  # one of `STATES`
    step: int | None = None  # the step received, for `received`
    checksum: str = ""  # the digest of all received bytes
    message: str = ""  # why the member failed


def epoch_path(job: Job, process_group: str, epoch: int) -> str:
    return f"{job.rendezvous}/{check_identity(process_group)}/{epoch}"


def latest_epoch(job: Job, process_group: str) -> int | None:
    """Return the newest epoch of a group, None before the first."""
    names = [
        entry.name for entry in list_if_there(job.disk, f"{job.rendezvous}/{check_identity(process_group)}")
    ]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


def write_offer(job: Job, offer: Offer) -> None:
    path = f"{epoch_path(job, offer.group, offer.epoch)}/{_OFFER}"
    write_document(job.disk, path, as_document(offer), private=True)


def clear_offers(job: Job, process_group: str, keep: int | None = None) -> None:
    """Remove the set-up of all epochs but one; the newest epoch's directory stays, so that epochs keep growing."""
    directory, newest = f"{job.rendezvous}/{check_identity(process_group)}", latest_epoch(job, process_group)
    for entry in list_if_there(job.disk, directory):
        if entry.kind != "directory" or entry.name == str(keep):
            continue
        if entry.name != str(newest):
            remove_tree(job.disk, f"{directory}/{entry.name}")
            continue
        for inner in list_if_there(job.disk, f"{directory}/{entry.name}"):
            remove_tree(job.disk, f"{directory}/{entry.name}/{inner.name}")


def read_offer(job: Job, process_group: str, epoch: int) -> Offer | None:
    """Return the offer of an epoch, None while there is none."""
    try:
        fields = read_document(job.disk, f"{epoch_path(job, process_group, epoch)}/{_OFFER}")
    except MISSING:
        return None
    if (fields.text("group"), fields.integer("epoch")) != (process_group, epoch):
        raise fields.wrong("epoch", "the group and epoch of its directory")
    members = fields.items("members")
    if any(type(member) is not str or not is_identity(member) for member in members):
        raise fields.wrong("members", "a list of identities")
    return record_from(
        Offer,
        fields,
        backend=fields.text("backend", GLOO),
        world_size=fields.integer("world_size", least=1),
        members=tuple(members),
        tensors=tuple(_tensor(fields, item) for item in fields.items("tensors")),
    )


def write_acknowledgement(job: Job, process_group: str, epoch: int, acknowledgement: Acknowledgement) -> None:
    path = f"{epoch_path(job, process_group, epoch)}/members/{check_identity(acknowledgement.member)}.json"
    write_document(job.disk, path, as_document(acknowledgement))


def read_acknowledgements(job: Job, process_group: str, epoch: int) -> dict[str, Acknowledgement]:
    """Return what each member has posted; unreadable files are skipped."""
    directory = f"{epoch_path(job, process_group, epoch)}/members"
    acknowledgements = {}
    for member, path in list_documents(job.disk, directory):
        if is_identity(member):
            with contextlib.suppress(*MISSING, CorruptDataError):
                fields = read_document(job.disk, path, SMALL_LIMIT)
                if fields.text("state") not in STATES:
                    raise fields.wrong("state", f"one of {', '.join(STATES)}")
                acknowledgements[member] = record_from(Acknowledgement, fields, member=member)
    return acknowledgements


def _tensor(fields: Fields, item: Any) -> TensorInfo:
    if type(item) is list and [type(part) for part in item] == [str, str, list]:
        name, dtype, shape = item
        if all(type(length) is int and length >= 0 for length in shape):
            return name, dtype, tuple(shape)
    raise fields.wrong("tensors", "a list of name, dtype and shape")
