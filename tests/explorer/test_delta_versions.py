"""Versions by deltas and keyframes while everything else happens: each is read as what a full save would have been.

Real processes: two daemons, whose leader is killed and comes back as the stand-by, and readers of three hosts, each
with a stage of its own, that are killed at any moment and come back, some to an empty stage. The test itself is the
trainer: it writes deltas and keyframes with shortcuts as two ranks do, deltas and whole steps as one, goes back to
earlier steps and writes their successors again; a person rolls back.
SYNCD_DELTA_VERSIONS is the number of versions, SYNCD_SEED the schedule.
"""

import contextlib
import os

import pytest
from support.delta_world import DAEMONS, READERS, World
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
    if chance < 0.10:
        world.restart(what.choice(READERS), late=what.random() < 0.4)
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
    world.wait(lambda version: version.step == world.parent and world.leader())
    world.fail_over()
    world.train()
    world.wait(lambda version: version.step == world.parent)


def join_late(world, name):
    """Let a reader without a copy come while the newest version is a delta: in every run."""
    while world.kinds[-1] != "delta":
        world.train()
    world.wait(lambda version: version.step == world.parent)
    world.restart(name, late=True)
    world.wait_for_readers(name, after=world.late[name])


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
        if number == VERSIONS // 3:
            lose_the_leader(world)
        if number == VERSIONS // 2:
            join_late(world, READERS[0])
    world.train()
    world.wait(lambda version: version.step == world.parent)
    world.wait_for_readers(*READERS)
    loads = {name: world.read(name) for name in READERS}
    for name, lines in loads.items():
        wrong = [line for line in lines if world.made[line[1]] != line[2]]
        assert not wrong, f"{name}: {wrong[:3]}"
    check_kept_steps(world)
    assert not any("step_damaged" in line for line in world.said(*DAEMONS))
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


def told(world):
    """Return the figures of a run."""
    counts = {kind: world.kinds.count(kind) for kind in sorted(set(world.kinds))}
    joins = {kind: world.joins.count(kind) for kind in sorted(set(world.joins))}
    return (
        f"{len(world.kinds)} versions, seed {SEED}: {counts}; {len(world.terms()) - 1} fail-overs, "
        f"{len(world.joins)} joins without a copy, by the kind of what they read first: {joins}"
    )
