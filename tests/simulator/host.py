"""A host's view of the server: what its kernel remembers of names and attributes, and for how long.

As measured on NFS with two clients: a name that was looked up, present or absent, is believed for a while;
opening a present file asks the server for the name again; opening the parent directory drops what is
remembered of it if the server shows a change; attributes of an unopened file are old for seconds.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass

from simulator.corruption import Corruption
from simulator.tree import Directory, File, Node, Tree, failure, split
from syncd.protocol.disk import FileStat


@dataclass(frozen=True, slots=True)
class Caching:
    """How long a host believes what it remembers, in seconds; zero for a local file system."""

    names: float = 0.0
    attributes: float = 0.0


class Host:
    """One client of the server; all processes on it share what it remembers.

    Args:
        name: For traces.
        tree: The server.
        now: The virtual time.
        caching: How long names and attributes are believed.
        corruption: What is wrong with its reads, if anything.
    """

    def __init__(
        self,
        name: str,
        tree: Tree,
        now: Callable[[], float],
        caching: Caching | None = None,
        corruption: Corruption | None = None,
    ) -> None:
        self.name, self.tree, self.corruption = name, tree, corruption
        self._now, self._caching = now, caching or Caching()
        self._names: dict[int, dict[str, tuple[Node | None, float]]] = {}
        self._seen: dict[int, int] = {}
        self._attributes: dict[int, tuple[FileStat, float]] = {}

    def find(self, path: str) -> Node:
        """Return the node that this host finds at a path."""
        return self._walk(path, asks=False)

    def open(self, path: str) -> Node:
        """Return the node that an open gets: the server is asked once more, for attributes too."""
        node = self._walk(path, asks=True)
        self._attributes.pop(node.inode, None)
        return node

    def find_directory(self, path: str) -> Directory:
        """Return the directory at a path."""
        node = self.find(path)
        if isinstance(node, File):
            raise failure(errno.ENOTDIR, path)
        return node

    def open_directory(self, path: str) -> Directory:
        """Open a directory: what is remembered of its names is dropped if the server shows a change."""
        directory = self.find_directory(path)
        if self._seen.get(directory.inode) != directory.stamp:
            self._seen[directory.inode] = directory.stamp
            self._names.pop(directory.inode, None)
        return directory

    def parent_of(self, path: str) -> tuple[Directory, str]:
        """Return the directory that holds a path, and the last part of it."""
        above, _, name = path.rpartition("/")
        return self.find_directory(above), name

    def stat(self, path: str) -> FileStat:
        """Return the attributes that this host has of a path."""
        node = self.find(path)
        if not self._caching.attributes:
            return node.stat()
        known = self._attributes.get(node.inode)
        if known is None or known[1] <= self._now():
            known = (node.stat(), self._now() + self._caching.attributes)
            self._attributes[node.inode] = known
        return known[0]

    def change(
        self, operation: Callable[[], object], lost: OSError | None, *names: tuple[Directory, str]
    ) -> None:
        """Carry out an operation of this host on some names; its kernel knows what became of them.

        Args:
            operation: The change.
            lost: What to raise although it was done: its answer was lost.
            names: What it changes.
        """
        before = [directory.stamp for directory, _ in names]
        try:
            operation()
        except OSError:
            self._doubt(names)
            raise
        if lost is not None:
            self._doubt(names)
            raise lost
        for (directory, name), stamp in zip(names, before, strict=True):
            # The answer carries the directory's stamp before and after: if nobody else changed it since this
            # host looked, what is remembered stays. Under a coarse stamp that masks changes of the same tick.
            if self._seen.get(directory.inode) == stamp:
                self._seen[directory.inode] = directory.stamp
            self._remember(directory, name, directory.children.get(name))

    def forget(self) -> None:
        """Forget everything: the host starts anew."""
        self._names.clear()
        self._seen.clear()
        self._attributes.clear()

    def _walk(self, path: str, *, asks: bool) -> Node:
        node: Node = self.tree.root
        parts, remembers = split(path), self._caching.names > 0
        last = len(parts) - 1
        for depth, part in enumerate(parts):
            if isinstance(node, File):
                raise failure(errno.ENOTDIR, path)
            asked = asks and depth == last
            child = self._child(node, part, asks=asked) if remembers else node.children.get(part)
            if child is None:
                raise failure(errno.ENOENT, path)
            node = child
        return node

    def _doubt(self, names: tuple[tuple[Directory, str], ...]) -> None:
        for directory, name in names:
            self._names.get(directory.inode, {}).pop(name, None)

    def _child(self, directory: Directory, name: str, *, asks: bool) -> Node | None:
        remembered = self._names.get(directory.inode)
        if remembered is not None and (known := remembered.get(name)) is not None and known[1] > self._now():
            node = known[0]
            # An open asks the server again for a name that is there; one that is absent is believed absent.
            if node is None or not (asks or node.parent is None):
                return node
        if directory.parent is None:
            return None
        node = directory.children.get(name)
        self._remember(directory, name, node)
        return node

    def _remember(self, directory: Directory, name: str, node: Node | None) -> None:
        if self._caching.names:
            names = self._names.setdefault(directory.inode, {})
            names[name] = (node, self._now() + self._caching.names)
