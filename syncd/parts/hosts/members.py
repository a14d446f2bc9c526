"""The two files by which hosts find each other: the list of hosts, and the token that lets them ask.

`.syncd/peers.json` (`members`: addresses, sorted; `term`) is written by the leader, through its term, when the
list changes. `.syncd/peer_token` has 64 hexadecimal digits and the permissions of the job: who may read the
weights may ask for them. Hosts with different lists only read more from the file system: digests decide, never the
list.
"""

import os
import re
from collections.abc import Iterable

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import SMALL_LIMIT, encode, read_document
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence

MEMBERS = "peers.json"
TOKEN = "peer_token"  # noqa: S105 - a name of a file
INFO = "peer"  # the fact of a presence that has the address of its host

MOST_MEMBERS = 4096
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{64}", re.ASCII)


def is_address(text: object) -> bool:
    """Return whether a text is `HOST:PORT`."""
    return isinstance(text, str) and _ADDRESS.fullmatch(text) is not None


def members_of(explorers: Iterable[Presence]) -> list[str]:
    """Return the addresses that presences name, sorted, each once."""
    named = (presence.info.get(INFO) for presence in explorers)
    return sorted({address for address in named if isinstance(address, str) and is_address(address)})[
        :MOST_MEMBERS
    ]


def encode_members(members: Iterable[str], term: int) -> bytes:
    return encode({"members": list(members), "term": term})


def read_members(job: Job) -> list[str]:
    """Return the members that the leader has written, none where it has not."""
    try:
        fields = read_document(job.disk, f"{job.state}/{MEMBERS}", SMALL_LIMIT)
        return sorted({address for address in fields.texts("members") if is_address(address)})
    except (*MISSING, CorruptDataError):
        return []


def new_token() -> bytes:
    return f"{os.urandom(32).hex()}\n".encode()


def read_token(job: Job) -> str | None:
    """Return the token of the job, None where there is none or this user may not read it.

    Raises:
        OSError: It cannot be read now, which says nothing about it.
    """
    try:
        text = job.disk.read(f"{job.state}/{TOKEN}", 1024).decode("ascii", "replace").strip()
    except (*MISSING, PermissionError, CorruptDataError):
        return None
    return text if _TOKEN.fullmatch(text) else None
