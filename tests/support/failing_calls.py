"""Lets one of the calls fail, or be the last one, with which this process works on files below a directory.

Calls of all threads count but those of heartbeats, which come when they come. What is counted are Python's calls of
the operating system, and fallocate, which the writer of shards calls in the C library; those that need room are told
from those that only read.
"""

import ctypes
import errno
import os
import signal
import threading
from functools import partial
from types import SimpleNamespace

from syncd.transports.files import shard

_ALLOCATE = "fallocate"
_NEED_ROOM = ("open", "write", "pwritev", "ftruncate", "fsync", "mkdir", "rename", _ALLOCATE)
_OTHERS = ("read", "pread", "lstat", "scandir", "unlink", "rmdir")
_NO_ROOM = ("ENOSPC", "EDQUOT")


class Fault:
    """Fails or kills at one call, within a block.

    Args:
        root: The directory.
        what: The name of an error, or KILL.
        at: The number of the call, from 1.
    """

    def __init__(self, root, what, at):
        self._root, self._what, self._at = root, what, at
        self._real, self._lock, self._count = {}, threading.Lock(), 0
        self.met = ""
        """The call that met the fault, empty if there are fewer calls."""

    def __enter__(self):
        self._libc = shard._LIBC
        shard._LIBC = SimpleNamespace(fallocate=self._allocate)
        for name in {*_NEED_ROOM, *_OTHERS} - {_ALLOCATE}:
            self._real[name] = getattr(os, name)
            setattr(os, name, partial(self._call, name))
        self._real[_ALLOCATE] = self._libc.fallocate
        return self

    def __exit__(self, *_):
        shard._LIBC = self._libc
        del self._real[_ALLOCATE]
        for name, real in self._real.items():
            setattr(os, name, real)

    def _allocate(self, *given):
        """Answer as the C library does."""
        try:
            return self._call(_ALLOCATE, *given)
        except OSError as error:
            ctypes.set_errno(error.errno)
            return -1

    def _call(self, name, *given, **more):
        place = self._place(name, given)
        if place and self._is_mine():
            self.met = f"{name} {place.removeprefix(self._root)}"
            if self._what == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self._what)
            raise OSError(number, os.strerror(number), place)
        return self._real[name](*given, **more)

    def _is_mine(self):
        with self._lock:
            self._count += 1
            return self._count == self._at

    def _place(self, name, given):
        """Return the path below the directory that a call is about, empty if it does not count."""
        if threading.current_thread().name == "syncd-heartbeat":
            return ""
        needs_room = name in _NEED_ROOM and (name != "open" or given[1] & os.O_CREAT)
        if self._what in (*_NO_ROOM, "KILL") and not needs_room:
            return ""
        path = given[0] if isinstance(given[0], str) else os.readlink(f"/proc/self/fd/{given[0]}")
        return path if path.startswith(f"{self._root}/") else ""
