"""A slow TCP link: so many bytes a second each way for all connections together, and a round trip of some time."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_PIECE = 16 << 10
_ON_THE_WAY = 64
"""Pieces that a connection has on the way, each way."""

Way = asyncio.Queue[tuple[float, bytes]]


class SlowLink:
    """Passes connections on to a port of this host.

    Args:
        rate: Bytes a second, each way.
        round_trip: Seconds.
    """

    def __init__(self, port: int, rate: float, round_trip: float) -> None:
        self._port, self._rate, self._delay = port, rate, round_trip / 2
        self._free_at = {"there": 0.0, "back": 0.0}
        self._loop = asyncio.new_event_loop()
        self.port = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._delay)
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(
                self._pass("there", reader, far_writer), self._pass("back", far_reader, writer)
            )

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one way of a connection until its end."""
        queue: Way = asyncio.Queue(_ON_THE_WAY)
        delivering = asyncio.create_task(self._deliver(queue, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                await queue.put((self._due(way, len(data)), data))
        await queue.put((0.0, b""))
        await delivering

    def _due(self, way: str, size: int) -> float:
        """Return when the last of so many bytes arrives."""
        self._free_at[way] = max(self._free_at[way], self._loop.time()) + size / self._rate
        return self._free_at[way] + self._delay

    async def _deliver(self, queue: Way, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while (piece := await queue.get())[1]:
                await asyncio.sleep(max(piece[0] - self._loop.time(), 0.0))
                writer.write(piece[1])
                await writer.drain()
            return
        while (await queue.get())[1]:  # nobody takes it any more
            pass

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Pass connections on, in a thread, until the end of the block."""
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._end)
            thread.join()
            server.close()
