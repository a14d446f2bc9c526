"""What a mirror copies next, what an object store keeps, how long it waits: properties of pure functions."""

import itertools
import threading
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import ManualClock

from syncd.errors import ConfigError, StorageError, TryAgainError
from syncd.parts.mirror.decisions import (
    LONGEST_WAIT,
    PastVersion,
    StoredStep,
    choose_way,
    kept_versions,
    lag,
    needed_keys,
    next_wait,
)
from syncd.parts.mirror.index import Index, decode_index, encode_index
from syncd.parts.mirror.links import Link, Way, find_way
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.worker import Work, Worker
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version


def version(step, generation=1):
    return Version(generation, step, "weights", f"global_step_{step}/actor", digest(step))


def digest(step):
    return f"sha256:{step:064x}"


def link(step, size, parent=None):
    shard = FileRecord("actor/a.safetensors", size, f"xxh3_128:{step:032x}", 1)
    delta = DeltaHeader(parent, digest(parent), "ulp1", 1, 2) if parent is not None else None
    kind = "delta" if delta else "weights"
    return Link(Manifest(step, 1, f"a{step}", (shard,), kind=kind, delta=delta, digest=digest(step)), b"")


def key(step):
    return link(step, 1).key


@dataclass
class World:
    """A source that writes versions, and a target; a keyframe each so many steps."""

    every: int
    sizes: tuple[int, int]

    def link(self, step, _digest=""):
        is_key = step % self.every == 0
        return link(step, self.sizes[not is_key], None if is_key else step - 1)


@given(
    every=st.integers(1, 12),
    sizes=st.tuples(st.integers(10, 300), st.integers(1, 40)),
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=60),
)
def test_every_mirror_arrives_however_fast_versions_come_and_copies_no_step_twice(every, sizes, arrivals):
    """`arrivals` are versions that come while one step is copied; the target then keeps what it was given."""
    world, there, newest, begun = World(every, sizes), {}, 0, None
    published, waited = -1, 0
    for count in [*arrivals, *[0] * (2 * every + 2)]:
        newest += count
        if newest <= published:
            continue

        def has(step, _digest):
            return step in there

        def find(wanted):
            return find_way(wanted, has, world.link, lambda _: False)

        way = choose_way(find(version(newest)), find(version(begun)) if begun is not None else None)
        assert way.version.step in {newest, begun}
        if begun is not None and begun != way.version.step:
            assert way.left < find(version(begun)).left
        if way.links:
            first = way.links[0]
            assert first.parent is None or first.parent[0] in there
            assert first.step not in there
            there[first.step] = True
            begun, waited = way.version.step, waited + 1
        else:
            assert way.version.step > published
            published, begun, waited = way.version.step, None, 0
        assert waited <= 4 * every + 4
    assert published == newest


def test_a_way_ends_at_what_the_target_has_and_begins_with_a_keyframe_elsewhere():
    links = {1: link(1, 100), 2: link(2, 5, 1), 3: link(3, 7, 2)}
    way = find_way(
        version(3), lambda step, _: step == 1, lambda step, _: links[step], lambda one: one.step == 2
    )
    assert ([one.step for one in way.links], way.base, way.left) == ([2, 3], 1, 7)
    way = find_way(version(3), lambda *_: False, lambda step, _: links[step], lambda _: False)
    assert ([one.step for one in way.links], way.base, way.left) == ([1, 2, 3], None, 112)
    with pytest.raises(TryAgainError, match="step 1"):
        find_way(
            version(3),
            lambda *_: False,
            lambda step, _: links.get(step) if step > 1 else None,
            lambda _: False,
        )


def test_the_version_that_was_begun_goes_on_while_less_of_it_is_left():
    newest, begun = Way(version(9), left=100), Way(version(5), left=40)
    assert choose_way(newest, begun) is begun
    assert choose_way(newest, replace(begun, left=101)) is newest
    assert choose_way(newest, None) is newest
    assert choose_way(newest, replace(begun, version=version(3, generation=2))) is newest


@given(
    seconds=st.lists(st.floats(0, 500), min_size=1, max_size=30),
    keep=st.integers(1, 5),
    grace=st.floats(0, 800),
    later=st.floats(0, 800),
)
def test_a_version_stays_for_its_grace_after_the_next_one_and_the_newest_always(seconds, keep, grace, later):
    at, history = 0.0, []
    for step, pause in enumerate(seconds):
        at += pause
        history.append(PastVersion(1, step, f"{step}-x", at))
    kept = kept_versions(history, keep, grace, at + later)
    assert kept[-min(keep, len(history)) :] == tuple(history[-keep:])
    for version_, after in itertools.pairwise(history):
        if at + later - after.at < grace:
            assert version_ in kept
        elif version_ not in history[-keep:]:
            assert version_ not in kept
    assert kept_versions(history, keep, grace, None) == tuple(history)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4))
def test_retention_never_takes_what_a_kept_version_is_stored_as_changes_of(parents, keep):
    """The step of each number changes the one so many before it; 0 is a keyframe."""
    index = Index()
    for step, back in enumerate(parents):
        parent = step - back if back and step >= back else None
        if parent is not None and key(parent) not in index.steps:
            return  # its trainer would not write changes of what nobody has
        one = link(step, 1, parent)
        index = index.with_version(version(step), [one], "job", float(step))
        index = index.pruned(keep, 0.0, 1e9)
        assert index.version.step == step
        for stored in index.steps.values():
            assert not stored.parent or stored.parent in index.steps
        assert not set(index.removing) & set(index.steps)
    assert decode_index(encode_index(index), "x") == index
    assert needed_keys(index.history, index.steps) == set(index.steps)


def test_needed_keys_end_at_steps_that_are_not_there():
    steps = {"2-b": StoredStep("2-b", "1-a"), "3-c": StoredStep("3-c", "2-b")}
    assert needed_keys([PastVersion(1, 3, "3-c")], steps) == {"2-b", "3-c"}


def test_the_lag_is_in_steps_and_never_none_while_a_version_is_missing():
    assert lag((1, 3), (1, 9)) == 6
    assert lag((1, 9), (2, 4)) == 1
    assert lag(None, (1, 9)) == 9
    assert lag((1, 9), (1, 9)) == lag((1, 9), None) == 0


def test_an_hour_without_a_store_is_said_once_for_each_reason_and_ends_with_one_recovery():
    hour, told, waited, failures = 3600.0, [], 0.0, 0

    def turn():
        if waited < hour / 2:
            raise StorageError("the object store does not answer")
        if waited < hour:
            raise ConfigError("the object store refuses the credentials", hint="aws sts get-caller-identity")
        return False

    def tell(name, level, **fields):
        told.append((name, fields))

    worker = Worker(Work("versions", turn, 0.25), tell, threading.Event())
    while (wait := worker.step()) != 0.25:
        failures, waited = failures + 1, waited + wait
    assert hour <= waited <= hour + LONGEST_WAIT
    assert failures < 80
    assert [name for name, _ in told] == ["mirror_failed", "mirror_failed", "mirror_recovered"]
    assert "does not answer" in told[0][1]["detail"]
    assert told[1][1]["hint"].startswith("aws sts")
    assert worker.error is None


@given(rate=st.integers(1 << 20, 1 << 30), sizes=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=8))
def test_a_limited_rate_is_the_average_of_all_but_the_last_piece(rate, sizes):
    clock = ManualClock()
    meter, began = Meter(clock, rate, threading.Event()), clock.at
    for size in sizes:
        meter.spend(size)
    assert meter.moved == sum(sizes)
    assert clock.at - began == pytest.approx(sum(sizes[:-1]) / rate, abs=1e-6)


def test_waits_double_up_to_a_minute():
    waits = [next_wait(failures) for failures in range(1, 400)]
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert max(waits) == LONGEST_WAIT == waits[-1]
    assert waits == sorted(waits)
