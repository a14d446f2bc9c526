"""One schedule: a world with a trainer, daemons, explorers and a person, trouble for a while, then calm."""

import contextlib
import functools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from unittest import mock

from simulator.chain_explorer import ChainExplorer
from simulator.corruption import Corruption
from simulator.daemons import DaemonProgram, draw_config
from simulator.deeds import USUAL, Deed, chance_of
from simulator.explorer import Explorer
from simulator.follower import Follower
from simulator.invariants import Observer
from simulator.liveness import unsettled
from simulator.person import Person
from simulator.record import JOB, Record
from simulator.remover import REMOVER, StateRemover
from simulator.trainer import Trainer
from simulator.tree import Directory, Tree, split, walk
from simulator.world import Process, Program, World
from syncd.config import DaemonConfig
from syncd.protocol.process import Process as Identity

CALM = 400.0
"""Seconds after the end of trouble within which everything must have come right."""

_SLICE = 5.0
_LEAVES = 0.2
_DELTAS = 0.5
"""The share of schedules in which the trainer stores deltas, if any may."""

_FOREIGN = (
    "notes.txt",
    "global_step_007/data",
    "global_step_-1/data",
    "global_step_1e3/x",
    "other/deep/data",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one schedule.

    Args:
        seed: The seed.
        failure: The invariant that did not hold, and how; None when all did.
        calls: System calls made.
        counts: What happened how often.
        seconds: Virtual seconds until everything had come right.
    """

    seed: int
    failure: tuple[str, str] | None
    calls: int
    counts: Counter[str]
    seconds: float


def run_schedule(
    seed: int, trace: Callable[[str], None] | None = None, deeds: frozenset[Deed] = USUAL
) -> Outcome:
    """Run one schedule to its end.

    Args:
        seed: Decides everything.
        trace: Takes each line of what happens.
        deeds: What it contains beyond faults of single calls.
    """
    world = World(seed, trace=trace)
    with _virtual(world):
        try:
            return _run(world, seed, deeds)
        finally:
            world.end()


def _run(world: World, seed: int, deeds: frozenset[Deed]) -> Outcome:
    if Deed.CORRUPT_READS in deeds:
        chance, longest = chance_of(seed, Deed.CORRUPT_READS), world.profile.caching.attributes
        world.corruption = Corruption(chance, lambda: not world.is_calm, longest)
    record = Record(world.tree)
    config = draw_config(world.random, caching=bool(world.profile.caching.names))
    observer = Observer(world, record, config)
    _plant(world.tree, record)
    deltas = chance_of(seed, Deed.DELTAS) if Deed.DELTAS in deeds else None
    if deltas is not None and deltas.random() >= _DELTAS:
        deltas = None
    trainer = _people(world, record, observer, config, deltas)
    _do(world, seed, deeds, trainer, lambda: _replace_job(world, record, observer))
    world.note(None, f"{world.profile} {config}")
    world.run(world.profile.trouble)
    left = _calm_down(world, lambda: unsettled(world, record, config))
    if world.failure is None and left:
        world.fail("I7 everything comes right", "; ".join(left))
    if world.corruption is not None:
        world.counts["flipped bits"], world.counts["late reads"] = (
            world.corruption.flips,
            world.corruption.late,
        )
    if world.failure is None and (gone := _missing(world.tree)):
        world.fail("I6 only what may go is removed", f"foreign files are gone: {gone}")
    return Outcome(seed, world.failure, world.calls, world.counts, world.now)


def _calm_down(world: World, unsettled: Callable[[], list[str]]) -> list[str]:
    left = ["not looked yet"]
    while left and world.now < world.profile.trouble + CALM and world.failure is None:
        world.run(world.now + _SLICE)
        left = unsettled()
    return left


def _people(
    world: World, record: Record, observer: Observer, config: DaemonConfig, deltas: Random | None
) -> Trainer:
    random = world.random
    trainer = Trainer(
        world,
        record,
        ranks=random.choice((1, 2, 2, 3)),
        pace=random.choice((0.5, 2.0, 6.0)),
        full_every=random.choice((2, 4)),
        torn=0.2,
    )
    if deltas is not None:
        trainer.store_deltas(deltas)
    trainer.start()
    poll = random.choice((0.5, 2.0))
    for number in range(random.choice((1, 2, 2, 3))):
        daemon = DaemonProgram(world, config, poll)
        world.start(
            Program(f"daemon{number}", world.host(f"node{number}"), daemon.main), random.uniform(0, 5)
        )
    for number in range(random.choice((1, 2, 3))):
        _start_explorer(world, observer, number, reads_deltas=deltas is not None)
    world.start(Program("person", world.host("desk"), Person(random).main))
    return trainer


def _do(
    world: World, seed: int, deeds: frozenset[Deed], trainer: Trainer, replace_job: Callable[[], None]
) -> None:
    """Have the deeds of a schedule done."""
    if Deed.ZOMBIE in deeds:
        trainer.leave_zombies(chance_of(seed, Deed.ZOMBIE))
    if Deed.STATE_REMOVED in deeds:
        remover = StateRemover(chance_of(seed, Deed.STATE_REMOVED))
        world.start(Program(REMOVER, world.host("other desk"), remover.main))
    if Deed.JOB_REPLACED in deeds:
        world.at(chance_of(seed, Deed.JOB_REPLACED).uniform(0.2, 0.9) * world.profile.trouble, replace_job)


def _replace_job(world: World, record: Record, observer: Observer) -> None:
    """Remove the job and make it again under daemons that run; all others are started again for the new one."""
    world.counts["job replaced"] += 1
    world.note(None, "the job is removed and made again")
    daemons = [program for program in world.programs if program.name.startswith("daemon")]
    others = [program for program in world.programs if program not in daemons]
    world.restart(others, world.random.uniform(1, 5))
    for program in world.programs:
        program.host.forget()
    world.tree.replace_directory(world.tree.root, split(JOB)[0])
    record.forget_job(world.now)
    observer.forget_job()
    _plant_foreign(world.tree, record)
    world.at(world.now + world.random.uniform(20, 60), lambda: world.restart(daemons, 1.0))


def _start_explorer(world: World, observer: Observer, number: int, *, reads_deltas: bool) -> None:
    random = world.random
    kind: type[Explorer | Follower] = random.choice((Explorer, Follower))
    kind = ChainExplorer if reads_deltas else kind
    explorer = kind(random, observer, random.choice((1.0, 2.0)), random.choice((0.1, 8.0)))
    program = Program(f"explorer{number}", world.host(f"gpu{number}"), explorer.main)
    world.start(program, random.uniform(0, 10))
    if random.random() < _LEAVES:
        world.at(random.uniform(10, world.profile.trouble + 10), functools.partial(_leave, program))


def _leave(program: Program) -> None:
    """Let a program go for good, without a word."""
    program.wanted = False
    if program.process is not None and not program.process.dead:
        program.process.kill()


def _plant(tree: Tree, record: Record) -> None:
    """Make the job."""
    tree.make_directory(tree.root, split(JOB)[0])
    _plant_foreign(tree, record)


def _plant_foreign(tree: Tree, record: Record) -> None:
    """Put files into the job that are none of anybody's business."""
    job = tree.find(JOB)
    assert isinstance(job, Directory), "it was made"
    for name in _FOREIGN:
        directory = job
        for part in split(name)[:-1]:
            inner = directory.children.get(part)
            directory = inner if isinstance(inner, Directory) else tree.make_directory(directory, part)
        record.plant(f"{JOB}/{name}", name.encode())
    for _, node in [("", tree.root), *walk(tree.root)]:
        if isinstance(node, Directory):
            tree.sync_directory(node)


def _missing(tree: Tree) -> list[str]:
    return [name for name in _FOREIGN if tree.find(f"{JOB}/{name}") is None]


@contextlib.contextmanager
def _virtual(world: World) -> Iterator[None]:
    """Let unique names follow from the seed while a schedule runs, and processes be those of the world."""

    def current() -> Process:
        assert world.current is not None, "only processes of the world ask who they are"
        return world.current

    with (
        mock.patch.object(uuid, "uuid4", functools.partial(_name, world.random)),
        mock.patch.object(Identity, "current", staticmethod(lambda: current().identity())),
        mock.patch.object(Identity, "is_gone", lambda other: current().sees_gone(other)),
    ):
        yield


def _name(random: Random) -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128), version=4)
