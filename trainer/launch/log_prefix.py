"""Brings what other ranks print to this process's stderr, line by line, with the rank in front."""

import os
import re
import sys
import threading

_PIECE = 1 << 16
_LONGEST = 1 << 16
"""A line that is longer is cut: a rank that never ends one must not fill our memory."""

_END = re.compile(rb"[\r\n]+")
_writing = threading.Lock()


class Pump:
    """A pipe that is read to its end by a thread of its own, so that the rank behind it waits for nothing else.

    Args:
        prefix: What stands before each line.
    """

    def __init__(self, prefix: str) -> None:
        self._source, self.entry = os.pipe()
        self._prefix = prefix.encode()
        self._thread = threading.Thread(target=self._run, name=f"pump {prefix}", daemon=True)

    def start(self) -> None:
        """Begin to read, once `entry` has been handed to the rank."""
        os.close(self.entry)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until the pipe's end, or no longer than this: a process that the rank has left may hold it."""
        self._thread.join(seconds)

    def _run(self) -> None:
        rest = b""
        while piece := os.read(self._source, _PIECE):
            *lines, rest = _END.split(rest + piece)
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            self._write(lines)
        self._write([rest])
        os.close(self._source)

    def _write(self, lines: list[bytes]) -> None:
        text = b"".join(b"%s%s\n" % (self._prefix, line) for line in lines if line)
        with _writing:
            _write_all(text)


def _write_all(text: bytes) -> None:
    # Nobody may read us any more, or our disk be full: ranks go on all the same, and their output is dropped.
    try:
        while text:
            text = text[os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text) :]
    except OSError:
        return
