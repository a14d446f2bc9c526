"""The file server of the simulator: one tree in memory, what of it is durable, who is told of its changes."""

import errno
import functools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from syncd.protocol.disk import FileStat

COMMIT_AFTER = 5.0
"""Seconds after which a journal makes names durable without being asked, as ext4 does."""

_TICK = 0.01
"""Seconds that one coarse time stamp lasts."""


class File:
    """A file, or with `is_link` a symbolic link, which nobody follows."""

    __slots__ = ("data", "durable", "inode", "is_link", "linked_at", "mtime_ns", "name", "parent")

    def __init__(self, inode: int, *, is_link: bool = False) -> None:
        self.inode, self.is_link = inode, is_link
        self.parent: Directory | None = None
        self.name = ""
        self.data = self.durable = b""
        self.mtime_ns = 0
        self.linked_at = 0.0

    def stat(self) -> FileStat:
        return FileStat("other" if self.is_link else "file", len(self.data), self.mtime_ns, self.inode)


class Directory:
    """A directory. One without a parent has been removed."""

    __slots__ = ("born", "changed_at", "children", "inode", "linked_at", "name", "parent", "stamp")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.parent: Directory | None = None
        self.name = ""
        self.children: dict[str, Node] = {}
        self.stamp = 0
        self.changed_at = self.linked_at = 0.0
        self.born = 0

    def stat(self) -> FileStat:
        return FileStat("directory", 0, self.stamp, self.inode)


Node: TypeAlias = File | Directory


class Change(NamedTuple):
    """One name of one directory, before and after."""

    directory: Directory
    name: str
    before: Node | None
    after: Node | None


Watcher = Callable[[tuple[Change, ...]], None]
"""Who is told of each change of names, right after it."""


class Tree:
    """The server.

    Args:
        now: The virtual time.
        coarse: Directories show changes by a coarse time stamp, as under NFSv3, instead of a counter.
    """

    def __init__(self, now: Callable[[], float], *, coarse: bool = False) -> None:
        self._now, self._coarse = now, coarse
        self._inodes = self._stamps = 0
        self._journal: list[tuple[float, tuple[Change, ...]]] = []
        self.watchers: list[Watcher] = []
        self.root = Directory(self._inode())
        self.root.parent = self.root

    def create(self, parent: Directory, name: str) -> File:
        """Create an empty file that must not exist."""
        file = File(self._inode())
        self._link(parent, name, file)
        return file

    def link(self, parent: Directory, name: str) -> None:
        """Create a symbolic link."""
        self._link(parent, name, File(self._inode(), is_link=True))

    def make_directory(self, parent: Directory, name: str) -> Directory:
        """Create a directory that must not exist."""
        directory = Directory(self._inode())
        directory.born = int(self._now() * 1e9) + 1
        self._link(parent, name, directory)
        return directory

    def replace_directory(self, parent: Directory, name: str) -> Directory:
        """Remove a directory with all that is in it, and make it again; it gets the inode number that became free."""
        before = self._present(parent, name)
        self._apply(Change(parent, name, before, None))
        directory = Directory(before.inode)
        self._link(parent, name, directory)
        self.sync_directory(parent)
        return directory

    def write(self, file: File, data: bytes) -> None:
        """Change the content of a file in place; it is not durable yet."""
        file.data = data
        file.mtime_ns = int(self._now() * 1e9)

    def unlink(self, parent: Directory, name: str) -> None:
        """Remove a file."""
        node = self._present(parent, name)
        if isinstance(node, Directory):
            raise failure(errno.EISDIR, name)
        self._apply(Change(parent, name, node, None))

    def remove_directory(self, parent: Directory, name: str) -> None:
        """Remove an empty directory."""
        node = self._present(parent, name)
        if isinstance(node, File):
            raise failure(errno.ENOTDIR, name)
        if node.children:
            raise failure(errno.ENOTEMPTY, name)
        self._apply(Change(parent, name, node, None))

    def rename(self, source: Directory, old: str, target: Directory, new: str) -> None:
        """Move a node to another place, and replace there what a rename would replace."""
        node, before = self._present(source, old), self._alive(target).children.get(new)
        if before is node:
            return
        _check_replaceable(node, before, new)
        if isinstance(node, Directory) and node in ancestors(target):
            raise failure(errno.EINVAL, new)
        self._apply(Change(source, old, node, None), Change(target, new, before, node))

    def sync_directory(self, directory: Directory) -> None:
        """Make the names of a directory durable, and what they depend on."""
        reached, left = {directory}, []
        for at, changes in reversed(self._journal):
            touched = {change.directory for change in changes}
            if touched & reached:
                reached |= touched
            else:
                left.append((at, changes))
        self._journal = left[::-1]

    def power_cut(self, lost: Callable[[int], int]) -> None:
        """Lose what was not synced: all data, and as many of the last changes of names as `lost` says."""
        journal, self._journal = self._journal, []
        for _, changes in reversed(journal[len(journal) - lost(len(journal)) :]):
            self._put(tuple(Change(c.directory, c.name, c.after, c.before) for c in reversed(changes)))
        for _, node in walk(self.root):
            if isinstance(node, File):
                node.data = node.durable

    def find(self, path: str) -> Node | None:
        """Return what is at a path, as somebody on the server itself sees it."""
        node: Node | None = self.root
        for part in split(path):
            node = node.children.get(part) if isinstance(node, Directory) else None
        return node

    def _inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _link(self, parent: Directory, name: str, node: Node) -> None:
        if name in self._alive(parent).children:
            raise failure(errno.EEXIST, name)
        self._apply(Change(parent, name, None, node))

    def _alive(self, directory: Directory) -> Directory:
        if directory.parent is None:
            raise failure(errno.ENOENT, directory.name)
        return directory

    def _present(self, parent: Directory, name: str) -> Node:
        node = self._alive(parent).children.get(name)
        if node is None:
            raise failure(errno.ENOENT, name)
        return node

    def _apply(self, *changes: Change) -> None:
        self._put(changes)
        self._commit_old()
        self._journal.append((self._now(), changes))
        for watcher in self.watchers:
            watcher(changes)

    def _put(self, changes: tuple[Change, ...]) -> None:
        now = self._now()
        self._stamps = int(now / _TICK) if self._coarse else self._stamps + 1
        for directory, name, before, after in changes:
            if before is not None and before.parent is directory and before.name == name:
                before.parent = None
            if after is None:
                directory.children.pop(name, None)
            else:
                directory.children[name] = after
                after.parent, after.name, after.linked_at = directory, name, now
            directory.stamp, directory.changed_at = self._stamps, now

    def _commit_old(self) -> None:
        if self._journal and self._journal[0][0] < self._now() - COMMIT_AFTER:
            limit = self._now() - COMMIT_AFTER
            self._journal = [item for item in self._journal if item[0] >= limit]


def failure(code: int, name: str) -> OSError:
    """Return the error of a system call."""
    return OSError(code, os.strerror(code), name)


@functools.lru_cache(maxsize=4096)
def split(path: str) -> tuple[str, ...]:
    """Return the parts of an absolute path."""
    return tuple(part for part in path.split("/") if part)


def ancestors(directory: Directory) -> Iterator[Directory]:
    """Yield a directory and those above it."""
    while directory.parent is not None and directory.parent is not directory:
        yield directory
        directory = directory.parent


def path_of(node: Node) -> str:
    """Return where a node really is, whatever path led to it."""
    parts = []
    while node.parent is not None and node.parent is not node:
        parts.append(node.name)
        node = node.parent
    return "/" + "/".join(reversed(parts))


def walk(directory: Directory, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node below a directory with its path relative to it."""
    for name, node in directory.children.items():
        yield f"{path}{name}", node
        if isinstance(node, Directory):
            yield from walk(node, f"{path}{name}/")


def _check_replaceable(node: Node, before: Node | None, name: str) -> None:
    if before is None:
        return
    if isinstance(node, Directory):
        if isinstance(before, File):
            raise failure(errno.ENOTDIR, name)
        if before.children:
            raise failure(errno.ENOTEMPTY, name)
    elif isinstance(before, Directory):
        raise failure(errno.EISDIR, name)
