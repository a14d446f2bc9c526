"""`SimDisk`: the file system of one simulated process, in the same small steps as the real one.

Each step is one system call: other processes run before it, it may fail, its answer may be lost, and the
process may die before it.
"""

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

from simulator.host import Host
from simulator.tree import Directory, File, Node
from syncd.errors import CorruptDataError
from syncd.protocol.disk import DOCUMENT_LIMIT, MISSING, Data, DirectoryEntry, FileStat, Kind, temporary_name
from syncd.protocol.local_disk import again

T = TypeVar("T")


class Machine(Protocol):
    """What runs a process: each system call passes through it."""

    def step(self, call: str, path: str) -> OSError | None:
        """Let time pass before a call.

        Returns:
            The error to report although the call succeeds: its answer is lost.

        Raises:
            OSError: The call fails and has no effect.
        """

    def sleep(self, seconds: float) -> None:
        """Let time pass between two attempts."""


class Steady:
    """A machine on which nothing goes wrong and nothing else runs."""

    def sleep(self, seconds: float) -> None:
        """Lose no time."""

    def step(self, call: str, path: str) -> OSError | None:
        return None


class SimDisk:
    """The file system as one process on a host has it.

    Args:
        host: The host.
        machine: What runs the process.
        room: Bytes that `free` reports.
    """

    def __init__(self, host: Host, machine: Machine | None = None, room: int = 1 << 40) -> None:
        self._host, self._tree, self._room = host, host.tree, room
        self._machine = machine or Steady()

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        data = self._again(lambda: self._read(path))
        if len(data) > limit:
            raise CorruptDataError(f"{len(data)} bytes where at most {limit} are expected", path=path)
        return data

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        del ahead
        return self._again(lambda: self._read(path))[offset : offset + length]

    def stat(self, path: str) -> FileStat:
        return self._again(lambda: self._stat(path))

    def born(self, path: str) -> int:
        node = self._host.find(path)
        return node.born if isinstance(node, Directory) else 0

    def list(self, path: str) -> list[DirectoryEntry]:
        return self._again(lambda: _entries(self._opened("list", path)))

    def refresh(self, path: str) -> None:
        self._again(lambda: self._opened("refresh", path))

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        directory, _, name = path.rpartition("/")
        temporary = f"{via or directory}/{temporary_name(name)}"
        try:
            self._write(temporary, data)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        self.sync_directory(directory)

    def rename(self, source: str, target: str) -> None:
        inode = self.stat(source).inode
        try:
            self._rename(source, target)
        except OSError:
            if not self._is_inode(target, inode):
                raise

    def make_directory(self, path: str) -> None:
        if self._is_directory(path):
            return
        parent = path.rpartition("/")[0]
        self.make_directory(parent)
        with contextlib.suppress(FileExistsError):
            self._make_directory(path)
        self.sync_directory(parent)

    def remove_directory(self, path: str) -> None:
        self._change("rmdir", path, self._tree.remove_directory)

    def unlink(self, path: str) -> None:
        self._change("unlink", path, self._tree.unlink)

    def sync_directory(self, path: str) -> None:
        self._machine.step("syncdir", path)
        self._tree.sync_directory(self._host.open_directory(path))

    def adopt(self, path: str) -> None:
        """Do nothing: nobody owns anything here."""

    def free(self, path: str) -> int:
        self._machine.step("statvfs", path)
        self._host.find(path)
        return self._room

    def inodes(self, path: str) -> int | None:
        self._machine.step("statvfs", path)
        self._host.find(path)
        return None

    def _read(self, path: str) -> bytes:
        self._machine.step("read", path)
        node = self._host.open(path)
        if not isinstance(node, File) or node.is_link:
            raise CorruptDataError("not a regular file", path=path)
        return self._content(path, node.data)

    def _content(self, path: str, opened: bytes) -> bytes:
        """Return what a read gives of a file with this content when it was opened."""
        corruption = self._host.corruption
        if corruption is None:
            return opened
        if pause := corruption.pause():
            self._machine.sleep(pause)
        return corruption.flipped(path, opened)

    def _stat(self, path: str) -> FileStat:
        self._machine.step("stat", path)
        return self._host.stat(path)

    def _again(self, operation: Callable[[], T]) -> T:
        return again(operation, self._machine.sleep)

    def _opened(self, call: str, path: str) -> Directory:
        self._machine.step(call, path)
        return self._host.open_directory(path)

    def _write(self, path: str, data: Data) -> None:
        made: list[File] = []
        self._change("create", path, lambda directory, name: made.append(self._tree.create(directory, name)))
        for part in (data,) if isinstance(data, bytes) else data:
            self._machine.step("write", path)
            self._tree.write(made[0], made[0].data + part)
        self._machine.step("fsync", path)
        made[0].durable = made[0].data

    def _rename(self, source: str, target: str) -> None:
        lost = self._machine.step("rename", f"{source} -> {target}")
        old, new = self._host.parent_of(source), self._host.parent_of(target)
        self._host.change(lambda: self._tree.rename(*old, *new), lost, old, new)

    def _make_directory(self, path: str) -> None:
        self._change("mkdir", path, self._tree.make_directory)

    def _change(self, call: str, path: str, operation: Callable[[Directory, str], object]) -> None:
        lost = self._machine.step(call, path)
        place = self._host.parent_of(path)
        self._host.change(lambda: operation(*place), lost, place)

    def _is_directory(self, path: str) -> bool:
        try:
            return self.stat(path).kind == "directory"
        except MISSING:
            return False

    def _is_inode(self, path: str, inode: int) -> bool:
        try:
            return self.stat(path).inode == inode
        except OSError:
            return False


def _entries(directory: Directory) -> list[DirectoryEntry]:
    return [DirectoryEntry(name, _kind(node)) for name, node in directory.children.items()]


def _kind(node: Node) -> Kind:
    if isinstance(node, Directory):
        return "directory"
    return "other" if node.is_link else "file"
