"""Simulated daemons: the real one, ticking on a virtual clock and disk. One leads, the others stand by."""

from random import Random

from simulator.disk import SimDisk
from simulator.record import JOB, STATE
from simulator.world import Process, World
from syncd.config import DaemonConfig
from syncd.daemon.service import Daemon
from syncd.observe.event_names import STEP_DAMAGED
from syncd.observe.events import Event
from syncd.protocol.layout import Job

_WOKEN = 0.2


class Teller:
    """An observer of a daemon: its events go to the trace."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def observe(self, event: Event) -> None:
        world = self._process.world
        world.counts[event.name] += 1
        if event.name == STEP_DAMAGED and "step" in event.fields:
            world.misjudged.add(int(event.fields["step"]))
        if "a bug in" in str(event.fields):
            world.fail("no unexpected error", f"{event.name} {dict(event.fields)}")
        if event.level != "debug":
            world.note(self._process, f"--- {event.name} {dict(event.fields)}")


class DaemonProgram:
    """How a daemon runs.

    Args:
        world: The world.
        config: Its configuration.
        poll: Seconds between two ticks, at most, while there is trouble.
    """

    def __init__(self, world: World, config: DaemonConfig, poll: float) -> None:
        self._world, self._config, self._poll = world, config, poll
        self._random = world.fork()

    def main(self, process: Process) -> None:
        """Tick for ever, or for a while and stop in good order."""
        ticks = self._random.choice((20, 80, 10**9, 10**9))
        daemon = self._daemon(process)
        while ticks or self._world.is_calm:
            seconds = daemon.tick(woken=self._random.random() < _WOKEN)
            process.sleep(seconds if self._world.is_calm else min(seconds, self._poll))
            ticks -= 1
        daemon.close()

    def _daemon(self, process: Process) -> Daemon:
        job = Job(JOB, STATE, SimDisk(process.host, process))
        return Daemon(
            job,
            self._config,
            process,
            Teller(process),
            process=process.identity(),
            gone=process.sees_gone,
        )


def draw_config(random: Random, *, caching: bool) -> DaemonConfig:
    """Draw a configuration whose times are short, so that little virtual time shows everything."""
    return DaemonConfig(
        keep_last=random.choice((1, 2, 3)),
        keep_every=random.choice((0, 0, 4)),
        keep_full=random.choice((0, 1, 2)),
        partial_grace=75.0,  # longer than any pause: a trainer that is away for longer has lost its step
        trash_grace=15.0 if caching else random.choice((0.5, 5.0)),
        reconcile=random.choice((10.0, 30.0)),
        ttl=20.0,
        takeover=random.choice((5.0, 10.0)),
        rewind_settle=1.0,
        verify=random.choice(("size", "header", "header", "content")),
    )
