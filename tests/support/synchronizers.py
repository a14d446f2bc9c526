"""The synchronizer for threads and the one for asyncio behind one face, so that one test body runs over both."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from support.jobs import start
from support.waiting import until
from syncd.client.aio import run
from syncd.client.broadcast_control import BroadcastControl
from syncd.client.broadcast_membership import BroadcastMembership
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import path_of, read_presence
from syncd.protocol.version import read_version
from syncd.synchronizer import AsyncSynchronizer, Synchronizer

LONG = 60.0
"""A bound that only a failing test reaches."""

eventually = until

A_WHILE = 0.25
"""How long something is watched that must not happen: many polls, many heartbeats' looks."""


class InterruptedClock(SystemClock):
    """A clock in whose sleep Ctrl-C is pressed."""

    pressed = False

    def sleep(self, seconds: float) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        super().sleep(seconds)


class Threads:
    """Opens synchronizers whose waits block a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)
        self._opened = []

    def open(self, *args, **options):
        clock = InterruptedClock()
        opened = Blocking(Synchronizer.open(*args, **{"clock": clock, **options}), self._pool, clock)
        self._opened.append(opened)
        return opened

    def shut(self) -> None:
        for opened in self._opened:
            opened.clock.pressed = True
            opened.close()
        self._pool.shutdown()


class Blocking:
    def __init__(self, inner, pool, clock) -> None:
        self.inner, self._pool, self.clock = inner, pool, clock

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def later(self, name, *args, **options) -> Future:
        """Call a method in the background."""
        return self._pool.submit(getattr(self.inner, name), *args, **options)

    def give_up(self, call: Future) -> BaseException:
        """End a call that waits from outside, and return how it ended."""
        self.clock.pressed = True
        error = call.exception(LONG)
        self.clock.pressed = False
        return error

    @property
    def client(self):
        return self.inner

    def broadcasts(self):
        """Return this process's side of broadcasts."""
        return Blocking(side_of(self.inner), self._pool, self.clock)


class Loop:
    """Opens synchronizers whose waits are coroutines of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._opened = []

    def open(self, *args, **options):
        opened = Coroutines(self.run(AsyncSynchronizer.open(*args, **options)), self)
        self._opened.append(opened)
        return opened

    def run(self, coroutine):
        return self.start(coroutine).result(LONG)

    def start(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def shut(self) -> None:
        self.run(self._cancel_all())
        for opened in self._opened:
            opened.close()
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Coroutines:
    def __init__(self, inner, loop) -> None:
        self.inner, self._loop = inner, loop

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self._loop.run(found(*args, **options))

    def later(self, name, *args, **options) -> Future:
        return self._loop.start(getattr(self.inner, name)(*args, **options))

    def give_up(self, call: Future) -> BaseException:
        call.cancel()
        # The task ends after the future: what it restores is waited for.
        self._loop.run(self._settled())
        assert call.cancelled()
        return asyncio.CancelledError()

    async def _settled(self) -> None:
        await asyncio.wait_for(
            asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True), LONG
        )

    @contextlib.contextmanager
    def lease(self, version):
        stack = contextlib.AsyncExitStack()
        try:
            yield self._loop.run(stack.enter_async_context(self.inner.lease(version)))
        finally:
            self._loop.run(stack.aclose())

    def get_model_state_dict_iterator(self):
        async def gathered():
            return [item async for item in self.inner.get_model_state_dict_iterator()]

        return iter(self._loop.run(gathered()))

    @property
    def client(self):
        return self.inner.client

    def broadcasts(self):
        """Return this process's side of broadcasts, its methods as coroutines."""
        return Coroutines(AsyncSide(side_of(self.inner.client)), self._loop)


class AsyncSide:
    """One side of broadcasts for asyncio, as a user of `aio.run` writes it."""

    def __init__(self, side) -> None:
        self._side = side

    def __getattr__(self, name):
        method = getattr(self._side, name)

        async def call(*args, **options):
            return await run(method, *args, **options)

        return call


def side_of(client):
    """Return the side of broadcasts that a process's role has."""
    return (BroadcastControl if client.role == "trainer" else BroadcastMembership)(client)


class World:
    """A job, a real daemon that ticks when told or all the time, and synchronizers of one kind."""

    def __init__(self, root, api) -> None:
        self.root, self.api = str(root), api
        self.job = Job.at(root)
        self.daemon, self.heard, _ = start(self.job, SystemClock(), rewind_settle=0.0)
        self._stop = threading.Event()
        self._thread = None

    def open(self, role="observer", identity=None, **options):
        return self.api.open(self.root, role, identity, **{"timeout": LONG, **options})

    def tick(self) -> None:
        self.daemon.tick(woken=True)

    def run(self) -> None:
        """Let the daemon tick by itself."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.tick()

    def shut(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        self.api.shut()
        self.daemon.close()

    def pair(self):
        version = read_version(self.job)
        return version.pair if version else None

    def explorer(self, identity):
        """Return what an explorer says of itself on disk."""
        return read_presence(self.job.disk, path_of(self.job.explorers, identity))

    def trainer(self, identity="trainer"):
        return read_presence(self.job.disk, path_of(self.job.trainers, identity))


def stays(call: Future) -> bool:
    """Say whether a call goes on waiting for a while."""
    with contextlib.suppress(TimeoutError):
        call.exception(A_WHILE)
    return not call.done()
