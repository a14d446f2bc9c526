"""Versions by deltas and keyframes while everything else happens: each is read as what a full save would have been.

Real processes: two daemons, whose leader is killed and comes back as the stand-by, and readers of three hosts, each
host with a stage of its own, that are killed or stopped at any moment and come back, some to an empty stage. Somebody
changes the copies in the stages. The test itself is the trainer: it writes deltas and keyframes with shortcuts as two
ranks do, deltas and whole steps as one, goes back to earlier steps and writes their successors again; a person rolls
back.
SYNCD_DELTA_VERSIONS is the number of versions, SYNCD_SEED the schedule.
"""

import contextlib
import os

import pytest
from support.delta_world import DAEMONS, HOSTS, READERS, World
from support.deltas import contents_digest
from support.jobs import steps_of

from syncd.errors import TryAgainError
from syncd.protocol.manifest import read_manifest
from syncd.transports.delta.materialise import materialise, prove

VERSIONS = int(os.environ.get("SYNCD_DELTA_VERSIONS", "50"))
SEED = int(os.environ.get("SYNCD_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 6 * VERSIONS))]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, SEED)
    yield made
    made.close()


def happen(world):
    """Let chance do something between two steps."""
    what, chance = world.random, world.random.random()
    if what.random() < 0.5:
        world.change_a_copy(what.choice(tuple(HOSTS.values())))
    if what.random() < 0.05:
        world.stop(what.choice((*READERS, *DAEMONS)), what.choice((0.1, 1.0, 5.0, 20.0)))
    if chance < 0.10:
        name = what.choice(READERS)
        late = what.random() < 0.4 and name in HOSTS.values()
        world.restart(name, late=late, changed=what.random() < 0.7)
    elif chance < 0.13:
        world.fail_over()
    elif chance < 0.17:
        world.rewind()
    elif chance < 0.19:
        world.roll_back()
    elif chance < 0.60:
        world.wait(lambda version: version.step == world.parent)


def lose_the_leader(world):
    """Kill the leader while steps wait: in every run, whatever the seed."""
    world.train()  # a person may just have rolled back, and the newest step is not published again
    world.wait(lambda version: version.step == world.parent and world.leader())
    world.fail_over()
    world.train()
    world.wait(lambda version: version.step == world.parent)


def join_late(world, name):
    """Let a reader without a copy come while the newest version is a delta: in every run."""
    world.train()
    while world.kinds[-1] != "delta":
        world.train()
    world.wait(lambda version: version.step == world.parent)
    world.restart(name, late=True)
    world.wake(everybody=True)
    world.wait_for_readers(name, after=world.late[name])


def change_while_dead(world, name):
    """Change the copy of the newest version while nobody lives who knows it: in every run."""
    world.train()
    world.wake(everybody=True)
    world.wait(lambda version: version.step == world.parent)
    world.wait_for_readers(name)
    before = len(world.read(name))
    world.restart(name, changed=True)
    world.wait_for_readers(name, after=before)


@pytest.mark.fault("a pruned chain is replayed on the wrong base")
@pytest.mark.fault("a delta is applied to a base that it was not made from")
@pytest.mark.fault("a patch that was applied half drifts until a restart")
def test_versions_by_deltas_are_bit_for_bit_those_of_full_saves_and_nobody_is_stranded(world, record_line):
    for name in (*DAEMONS, *READERS):
        world.run(name)
    for number in range(VERSIONS):
        world.train()
        happen(world)
        world.mend()
        world.wake()
        if number == VERSIONS // 3:
            lose_the_leader(world)
        if number == VERSIONS // 2:
            join_late(world, READERS[0])
        if number in (VERSIONS // 4, VERSIONS * 2 // 3):
            change_while_dead(world, READERS[1])
    world.train()
    world.wake(everybody=True)
    world.wait(lambda version: version.step == world.parent)
    world.wait_for_readers(*READERS)
    loads = {name: world.read(name) for name in READERS}
    for name, lines in loads.items():
        wrong = [line for line in lines if world.made[line[1]] != line[2]]
        assert not wrong, f"{name}: {wrong[:3]}"
    check_kept_steps(world)
    assert not [line for line in world.said(*DAEMONS) if "step_damaged" in line]
    assert {"delta", "shortcut", "weights"} <= set(world.kinds)
    check_what_happened(world)
    record_line(f"{told(world)}; read {[len(lines) for lines in loads.values()]}")


def check_kept_steps(world):
    """Materialise every step that retention has left."""
    for step in steps_of(world.job):
        with contextlib.suppress(TryAgainError):  # retention goes on
            assert prove(world.job, step) == []
            materialise(world.job, step, str(world.place / f"made{step}"))
            digest = read_manifest(world.job.disk, world.job.step(step)).digest
            assert contents_digest(world.place / f"made{step}") == world.made[digest]


def check_what_happened(world):
    """A kill of the leader is a fail-over, and readers without a copy have joined by keyframe and chain."""
    for name in READERS:
        world.note_join(name)
    assert len(world.terms()) > world.kills > 0
    assert "delta" in world.joins
    assert damaged(world), "no changed copy was met"


def damaged(world):
    """Return what readers said of staged copies that had been changed."""
    return [line for line in world.said(*READERS) if line.startswith("stage_copy_damaged")]


def told(world):
    """Return the figures of a run."""
    counts = {kind: world.kinds.count(kind) for kind in sorted(set(world.kinds))}
    joins = {kind: world.joins.count(kind) for kind in sorted(set(world.joins))}
    return (
        f"{len(world.kinds)} versions, seed {SEED}: {counts}; {len(world.terms()) - 1} fail-overs, "
        f"{len(world.joins)} joins without a copy, by the kind of what they read first: {joins}; "
        f"{world.stops} stops; {world.changed} changes of staged copies, {len(damaged(world))} met"
    )
