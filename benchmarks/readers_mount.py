"""A mount whose files come through a limited link: names from a directory, bytes by range over HTTP. Needs root.

A kernel without a network file system still gives a reader what one gives: a page cache, read-ahead, and plain calls
of `open`, `read` and `mmap`. It is read-only, and its server is a process of its own, so that its processor time is
not the reader's, as a kernel's is not.
"""

import ctypes
import errno
import http.client
import os
import stat
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_HEADER = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_LARGEST, _PAGES = 32 << 10, 8
_READ_AHEAD = (
    32 << 10
)  # as much smaller than usual as the pieces of the step are, or it is read in part twice
_FLAGS = 1 | 1 << 22  # ASYNC_READ, MAX_PAGES
_THREADS = 4
_TIME = 3600  # seconds for which the kernel may keep names and attributes: a sealed step does not change


def mount(path: str, origin: str, where: str) -> None:
    """Cover a directory, in this mount namespace, with what comes from `origin` as `where`, until the process ends.

    Raises:
        OSError: It cannot be mounted.
    """
    below = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # what lies below the mount, for names and sizes
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_LARGEST}"
    if _LIBC.mount(b"readers", os.fsencode(path), b"fuse", 1, options.encode()):
        raise OSError(ctypes.get_errno(), "no mount of FUSE", path)
    command = [sys.executable, __file__, str(device), str(below), origin, where]
    subprocess.Popen(command, pass_fds=(device, below), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(device)
    os.close(below)


class Server:
    """Answers the kernel.

    Args:
        device: The open mount.
        below: The directory that the mount covers.
        origin: HOST:PORT of who gives ranges.
        where: The path of the directory there.
    """

    def __init__(self, device: int, below: int, origin: str, where: str) -> None:
        self._device, self._root, self._origin, self._where = (
            device,
            f"/proc/self/fd/{below}",
            origin,
            where,
        )
        self._paths, self._lock, self._local = {1: ""}, threading.Lock(), threading.local()
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: self._attributes,
            14: self._open,
            15: self._read,
            18: self._nothing,
            25: self._nothing,
            26: self._begin,
            27: self._open,
            28: self._list,
            29: self._nothing,
        }

    def run(self) -> None:
        """Answer until the mount is gone."""
        threads = [threading.Thread(target=self._serve) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        with suppress(OSError):  # the mount is gone
            while True:
                request = os.read(self._device, (1 << 20) + 4096)
                _, code, unique, node, *_ = _HEADER.unpack_from(request)
                if code not in (2, 42):  # FORGET wants no answer
                    self._reply(unique, code, node, request[_HEADER.size :])

    def _reply(self, unique: int, code: int, node: int, body: bytes) -> None:
        answer, error = b"", 0
        try:
            if code in self._answers:
                answer = self._answers[code](node, body)
            else:
                error = -errno.ENOSYS
        except OSError as problem:
            error = -(problem.errno or errno.EIO)
        os.write(self._device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

    def _begin(self, _node: int, _body: bytes) -> bytes:
        limits = struct.pack("<HHIIHHI", 16, 12, 1 << 20, 1, _PAGES, 0, 0)
        return struct.pack("<IIII", 7, 31, _READ_AHEAD, _FLAGS) + limits + bytes(28)

    def _lookup(self, node: int, body: bytes) -> bytes:
        path = f"{self._paths[node]}/{os.fsdecode(body.rstrip(bytes(1)))}"
        found = os.stat(self._root + path)
        with self._lock:
            self._paths[found.st_ino] = path
        return struct.pack("<QQQQII", found.st_ino, 0, _TIME, _TIME, 0, 0) + _attributes(found)

    def _attributes(self, node: int, _body: bytes) -> bytes:
        found = os.stat(self._root + self._paths[node])
        return struct.pack("<QII", _TIME, 0, 0) + _attributes(found)

    def _open(self, _node: int, _body: bytes) -> bytes:
        return struct.pack("<QII", 0, 2, 0)  # the page cache is kept

    def _nothing(self, _node: int, _body: bytes) -> bytes:
        return b""

    def _list(self, node: int, body: bytes) -> bytes:
        _, begin, size, *_ = struct.unpack_from("<QQI", body)
        listed = b""
        entries = sorted(os.scandir(self._root + self._paths[node]), key=lambda entry: entry.name)
        for number, entry in enumerate(entries[begin:], begin + 1):
            name, kind = os.fsencode(entry.name), 4 if entry.is_dir() else 8
            one = struct.pack("<QQII", entry.inode(), number, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(listed) + len(one) > size:
                break
            listed += one
        return listed

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        length = min(offset + size, os.stat(self._root + self._paths[node]).st_size) - offset
        return self._fetched(self._paths[node], offset, length) if length > 0 else b""

    def _fetched(self, path: str, offset: int, length: int) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(self._origin, timeout=600)
        ranges = {"Range": f"bytes={offset}-{offset + length - 1}"}
        try:
            connection.request("GET", f"{self._where}{path}", headers=ranges)
            found: bytes = connection.getresponse().read()
        except http.client.HTTPException as error:
            raise OSError(errno.EIO, str(error)) from error
        if len(found) != length:
            raise OSError(errno.EIO, "a short answer")
        return found


def _attributes(found: os.stat_result) -> bytes:
    times = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
    mode = found.st_mode if stat.S_ISDIR(found.st_mode) else stat.S_IFREG | 0o644
    return _ATTR.pack(
        found.st_ino, found.st_size, (found.st_size + 511) // 512, *times, *(0, 0, 0),
        mode, found.st_nlink, 0, 0, 0, 4096, 0,
    )  # fmt: skip


if __name__ == "__main__":
    Server(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]).run()
