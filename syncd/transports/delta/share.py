"""The changes of one shard between two steps, both of which are in memory: what a trainer stores of its share."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from syncd.protocol.delta import Target, Tile, tiles
from syncd.protocol.safetensors import parse_header
from syncd.transports.delta.container import NewContainer
from syncd.transports.delta.ulp1 import EncodedFrame, encode

_AHEAD = 4  # tiles that are encoded at once or wait to be added; each takes a few times its 8 MiB


def encode_shard(
    target: Target, header: bytes, old: memoryview, new: memoryview, writer: int, pool: Executor
) -> NewContainer:
    """Return the container that turns a shard file into another one with the same header; the caller closes it.

    `header` has the bytes before its data; `new` has as many bytes as `old`. `pool` encodes tiles, a core each.
    """
    container = NewContainer([target], writer)
    try:
        for encoded in _in_order(_encodings(target, header, old, new, pool)):
            container.add(encoded)
    except BaseException:
        container.close()
        raise
    return container


def _encodings(
    target: Target, header: bytes, old: memoryview, new: memoryview, pool: Executor
) -> Iterator[Future[EncodedFrame]]:
    start = len(header)
    for tile in tiles(parse_header(header, target.size, target.name)):
        before, after = (_part(header, old, tile, start), _part(header, new, tile, start))
        yield pool.submit(encode, before, after, width=tile.width, offset=tile.offset)


def _part(header: bytes, data: memoryview, tile: Tile, start: int) -> memoryview:
    if tile.offset < start:
        return memoryview(header)[tile.offset : tile.offset + tile.length]
    return data[tile.offset - start : tile.offset - start + tile.length]


def _in_order(begun: Iterator[Future[EncodedFrame]]) -> Iterator[EncodedFrame]:
    """Yield results in their order, a few being made meanwhile; none is being made once this has ended."""
    waiting = deque[Future[EncodedFrame]]()
    try:
        for future in begun:
            waiting.append(future)
            if len(waiting) == _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:  # no thread may read the memory any more
            future.exception()
