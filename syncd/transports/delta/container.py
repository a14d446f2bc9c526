"""A container of changes while it is written: frames are collected, then the file is yielded piece by piece."""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Self

from syncd.context import Closing
from syncd.errors import StorageError
from syncd.protocol.delta import RECORD, Frame, Target, encode_frame_record, encode_targets
from syncd.protocol.digest import CHUNK
from syncd.protocol.safetensors import encode_header
from syncd.transports.delta.ulp1 import EncodedFrame

STREAMS_IN_MEMORY = 256 << 20
"""Bytes of streams that are kept in memory; more go to a temporary file of this host."""


class NewContainer(Closing):
    """Collects the frames of one writer, then yields the file that makes `targets`, in the order of their frames.

    Writers count from 1, and name their tensors by that, since no two shards share a name.
    """

    def __init__(self, targets: Sequence[Target], writer: int = 1) -> None:
        self._targets, self._number = encode_targets(targets), f"{writer:05d}"
        self._streams = tempfile.SpooledTemporaryFile(max_size=STREAMS_IN_MEMORY)  # noqa: SIM115 - until `close`
        self.frames: list[Frame] = []
        self.stored = 0  # bytes of the streams so far

    def add(self, encoded: EncodedFrame) -> Self:
        self.frames.append(encoded.frame)
        try:
            self._streams.write(b"".join(encoded.streams))
        except OSError as error:
            directory = tempfile.gettempdir()
            what = (
                f"no temporary file for more than {STREAMS_IN_MEMORY >> 20} MiB of changes: {error.strerror}"
            )
            raise StorageError(what, path=directory, hint="export TMPDIR=DIR  # with more room") from error
        self.stored += encoded.frame.stored
        return self

    def pieces(self) -> Iterator[bytes]:
        records, count = RECORD.size * len(self.frames), len(self._targets)
        yield encode_header([
            (f"targets-{self._number}", "U8", (count,), count),
            (f"frames-{self._number}", "U8", (len(self.frames), RECORD.size), records),
            (f"streams-{self._number}", "U8", (self.stored,), self.stored),
        ])  # fmt: skip
        yield self._targets
        yield b"".join(map(encode_frame_record, self.frames))
        self._streams.seek(0)
        while piece := self._streams.read(CHUNK):
            yield piece

    def close(self) -> None:
        self._streams.close()
