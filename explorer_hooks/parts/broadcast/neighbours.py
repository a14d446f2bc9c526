"""Whether the workers of an SGLang server share this host's memory, as /proc says.

A tunnel or a container may answer at an address of this host's loopback. SGLang ends if a worker cannot open what it
is given, so this is known before: the workers must be descendants of the process that listens at the address.
"""

import contextlib
import os
import re
from collections.abc import Iterator

from explorer_hooks.parts.broadcast.segments import DIRECTORY
from syncd.errors import LoadFailedError

_WORKER = b"sglang::scheduler"  # how SGLang's workers call themselves

_LISTENING = "0A"
_VISIBLE = b"CUDA_VISIBLE_DEVICES="


def require_shared_memory(port: int, workers: int, *, on_gpu: bool) -> None:
    """Return if all workers of the server that listens at a port can open what this process shares.

    With `on_gpu` that is a GPU's memory: then they must see the same GPUs as this process.
    """
    pids = [pid for pid in _family(_listeners(port)) if _read(pid, "cmdline").startswith(_WORKER)]
    alike = [pid for pid in pids if _sees_memory(pid) and (not on_gpu or _sees_gpus(pid))]
    if len(alike) < workers or alike != pids:
        raise LoadFailedError(
            f"of {workers} workers of the server at port {port}, {len(alike)} share this process's memory",
            hint="run SGLang on this host as this user (docker run --ipc=host --pid=host), or push=gloo",
        )


def _listeners(port: int) -> list[int]:
    """Return the processes that listen at a port, as far as this user may know."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    return [pid for pid in _processes() if sockets & set(_links(pid))]


def _inodes(port: int) -> Iterator[str]:
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(name, encoding="ascii") as table:
            rows = [line.split() for line in table.readlines()[1:]]
            yield from (row[9] for row in rows if row[3] == _LISTENING and _port(row[1]) == port)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _links(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def _family(elders: list[int]) -> list[int]:
    parents = {pid: _parent(pid) for pid in _processes()}
    family, before = set(elders), 0
    while len(family) > before:
        before = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sorted(family)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    match = re.search(rb"^PPid:\s+(\d+)", _read(pid, "status"), re.MULTILINE)
    return int(match[1]) if match else 0


def _sees_memory(pid: int) -> bool:
    with contextlib.suppress(OSError):
        there, here = os.stat(f"/proc/{pid}/root{DIRECTORY}"), os.stat(DIRECTORY)
        is_same = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
        return is_same and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    return False


def _sees_gpus(pid: int) -> bool:
    visible = [variable for variable in _read(pid, "environ").split(b"\0") if variable.startswith(_VISIBLE)]
    own = os.environ.get(_VISIBLE[:-1].decode())
    return visible == ([] if own is None else [_VISIBLE + own.encode()])


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""
