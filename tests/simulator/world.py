"""The virtual world: hosts, processes that are greenlets, one clock, and a queue of what happens next.

Every system call and every sleep of a process ends in `World`, which lets virtual time pass, runs whoever is
due before, and strikes the call with what the seed says. Nothing depends on real time, so a seed replays.
"""

import functools
import heapq
import math
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NoReturn

from greenlet import greenlet

from simulator.faults import Fault, Profile, Weather
from simulator.host import Host
from simulator.tree import Tree
from syncd.errors import SyncdError
from syncd.protocol.process import Process as Identity

if TYPE_CHECKING:
    from simulator.corruption import Corruption

_EPOCH = 1.7e9
_LOOK_AT_HELD = 0.5


class Crash(BaseException):
    """The process dies here: nothing it does from now on has any effect."""


class Process:
    """One run of a program on a host; it is its `Clock` and its `Machine`."""

    def __init__(self, world: "World", program: "Program", number: int) -> None:
        self.world, self.program, self.number = world, program, number
        self.host, self.name = program.host, f"{program.name}#{number}"
        self.dead = self.killed = False
        self.visited: dict[str, float] = {}
        """When this process last asked the file system for a path."""
        self._greenlet = greenlet(self._run)

        self.held: Callable[[], bool] | None = None
        """Says how long this process is paused, if it is; it then continues with its next call."""

    def monotonic(self) -> float:
        return self.world.now + self.program.boot

    def time(self) -> float:
        return self.world.now + self.program.skew

    def sleep(self, seconds: float) -> None:
        self.world.wait(self, seconds)

    def step(self, call: str, path: str) -> OSError | None:
        """Pass through one system call."""
        return self.world.call(self, call, path)

    def identity(self) -> Identity:
        """Return what tells this process from others, as the process table of its host would."""
        return Identity(self.host.name, "", self.number, self.number)

    def sees_gone(self, other: Identity) -> bool:
        """Say what a look at the process table says; one program runs on each host."""
        return other.boot == self.host.name and other.pid != self.number

    def switch(self) -> None:
        """Run until the process waits again."""
        if self.dead:
            return
        if self.held is not None and self.held():
            self.world.at(self.world.now + _LOOK_AT_HELD, self.switch)
            return
        self.held = None
        self.world.current = self
        self._greenlet.switch()

    def kill(self) -> None:
        """End the process at once, from outside."""
        self.dead = self.killed = True
        if not self._greenlet.dead:
            self._greenlet.throw(Crash)

    def _run(self) -> None:
        try:
            self.program.main(self)
        except Crash:
            pass
        except (OSError, SyncdError) as error:
            self.world.note(self, f"exits: {error!r}")
        except Exception:  # noqa: BLE001 - any other error is a bug that the simulation is there to find
            self.world.fail("no unexpected error", traceback.format_exc())
        by_itself = not self.killed
        self.dead = True
        if by_itself:
            self.world.ended(self)


class Program:
    """Something that runs on a host, and is started again whenever it ends, while `wanted`.

    Args:
        name: For traces.
        host: Where it runs.
        main: What one process of it does.
        delay: Seconds until it is started again, at most.

    Its `peers`, if any, end when it ends, and are started again together.
    """

    def __init__(self, name: str, host: Host, main: Callable[[Process], None], delay: float = 20.0) -> None:
        self.name, self.host, self.main, self.delay = name, host, main, delay
        self.boot = self.skew = 0.0
        self.wanted = True
        self.peers: list[Program] = []
        self.runs = 0
        self.process: Process | None = None


class World:
    """One schedule.

    Args:
        seed: Decides everything.
        profile: The weather; drawn from the seed unless given.
        trace: Takes each line of what happens.
    """

    def __init__(
        self, seed: int, profile: Profile | None = None, trace: Callable[[str], None] | None = None
    ) -> None:
        self.random = Random(seed)
        self.profile = profile or Profile.draw(self.random)
        self.now = 0.0
        self.tree = Tree(lambda: self.now, coarse=self.profile.coarse)
        self.counts: Counter[str] = Counter()
        self.failure: tuple[str, str] | None = None
        self.current: Process | None = None
        self.programs: list[Program] = []
        self.forgotten_at = float("-inf")
        """When a daemon that could not know it began to count pairs afresh: the state directory had been removed."""
        self.after_power_cut: list[Callable[[], None]] = []
        self.corruption: Corruption | None = None
        self.misjudged: set[int] = set()
        """Steps that a daemon calls damaged, since it has read them wrongly: no rule counts them."""
        self.leaves_behind: Callable[[Process], bool] = lambda _: False
        """Whether a process whose peers end is paused instead of ended with them."""
        self._trace = trace
        self._hub = greenlet.getcurrent()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._left_behind: list[Process] = []
        self._order = self.calls = 0
        self._weather = Weather(self.profile, self.random)
        self._outages: dict[str, tuple[float, OSError]] = {}
        self._until = 0.0
        self._ending = False

    @property
    def is_calm(self) -> bool:
        """Say whether all trouble has ended."""
        return self.now > self.profile.trouble

    def fork(self) -> Random:
        """Return a source of chance of one's own."""
        return Random(self.random.getrandbits(64))

    def host(self, name: str) -> Host:
        """Return a new client of the server."""
        return Host(name, self.tree, lambda: self.now, self.profile.caching, self.corruption)

    def start(self, program: Program, after: float = 0.0) -> Program:
        """Start a program, now or later."""
        program.boot, program.skew = self.random.uniform(10, 1e6), _EPOCH + self.random.uniform(-4000, 4000)
        self.programs.append(program)
        self.at(self.now + after, functools.partial(self._launch, program))
        return program

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, action))

    def run(self, until: float) -> None:
        """Let time pass until `until` or the first failure."""
        self._until = until
        while self._queue and self._queue[0][0] <= until and self.failure is None:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.current = None
        if self.failure is None:
            self.now = until

    def end(self) -> None:
        """End every process."""
        self._ending = True
        self._kill(self.programs)
        self._kill_left_behind()

    def wait(self, process: Process, seconds: float) -> None:
        """Let time pass for one process."""
        if process.dead:
            raise Crash
        when = self.now + seconds
        if (self._queue and self._queue[0][0] <= when) or when > self._until or self.failure is not None:
            self.at(when, process.switch)
            self._hub.switch()
            if process.dead:
                raise Crash
        else:
            self.now = when

    def call(self, process: Process, call: str, path: str) -> OSError | None:
        """Pass one system call: time, then whatever strikes it."""
        self.wait(process, self.profile.latency * -math.log(1.0 - self.random.random()))
        self.calls += 1
        if self._trace is not None:
            self.note(process, f"{call} {path}")
        process.visited[path] = self.now
        if self.is_calm:
            return None
        if (outage := self._outages.get(process.host.name)) is not None and outage[0] > self.now:
            raise outage[1]
        return self._strike(process, call, path) if self._weather.calls() else None

    def fail(self, invariant: str, detail: str) -> None:
        """Record that an invariant does not hold; the first one ends the schedule."""
        if self.failure is None:
            self.failure = (invariant, detail)
            if self._trace is not None:
                self._trace(f"{self.now:10.4f} VIOLATION {invariant}: {detail}")

    def note(self, process: Process | None, text: str) -> None:
        """Write a line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now:10.4f} {process.name if process else 'world':14} {text}")

    def ended(self, process: Process) -> None:
        """Hear that a process has ended by itself; its peers are ended with it, and all started again."""
        program = process.program
        if not self._ending and program.wanted and program.process is process:
            group = program.peers or [program]
            self.at(self.now, lambda: self._end_group(group))
            self._relaunch(
                group, self.random.choice((0.1, 1.0, program.delay)) * (0.5 + self.random.random())
            )

    def power_cut(self) -> None:
        """End every process at once, and lose what was not durable."""
        self.counts["power cuts"] += 1
        self.note(None, "power cut")
        for program in self.programs:
            program.host.forget()
        self._kill(self.programs)
        self._kill_left_behind()
        self.tree.power_cut(lambda pending: self.random.randint(0, pending))
        for action in self.after_power_cut:
            action()
        for group in {
            id(program.peers or program): program.peers or [program] for program in self.programs
        }.values():
            self._relaunch(group, self.random.uniform(0.1, 20))

    def restart(self, programs: list[Program], after: float) -> None:
        """End programs from outside, and start them again together."""
        self._kill(programs)
        self._relaunch([program for program in programs if program.wanted], after)

    def _end_group(self, group: list[Program]) -> None:
        """End the peers of a process that has ended; one of them may be left behind, paused."""
        for program in group:
            process = program.process
            if process is not None and not process.dead and self.leaves_behind(process):
                self._left_behind.append(process)
                program.process = None
        self._kill(group)

    def _kill_left_behind(self) -> None:
        for process in self._left_behind:
            if not process.dead:
                process.kill()

    def _kill(self, programs: list[Program]) -> None:
        for program in programs:
            if program.process is not None and not program.process.dead:
                program.process.kill()

    def _relaunch(self, group: list[Program], after: float) -> None:
        for program in group:
            self.at(self.now + after, functools.partial(self._launch, program))

    def _launch(self, program: Program) -> None:
        if self._ending or not program.wanted or (program.process and not program.process.dead):
            return
        program.runs += 1
        program.process = Process(self, program, program.runs)
        program.process.switch()

    def _strike(self, process: Process, call: str, path: str) -> OSError | None:
        kind = self._weather.kind()
        self.counts[kind] += 1
        self.note(process, f"*** {kind}")
        if kind is Fault.ERROR:
            raise self._weather.error(call, path)
        if kind is Fault.LOST:
            return self._weather.lost(call, path)
        if kind is Fault.CRASH:
            self._die(process)
        if kind is Fault.POWER:
            self.at(self.now, self.power_cut)
            self._die(process)
        if kind is Fault.OUTAGE:
            ends = self.now + self.random.uniform(1, 20)
            self._outages[process.host.name] = (ends, self._weather.error(call, path))
            return None
        self.wait(process, self.random.uniform(5, 60) if kind is Fault.PAUSE else self.random.uniform(0.1, 5))
        return None

    def _die(self, process: Process) -> NoReturn:
        process.dead = True
        raise Crash
