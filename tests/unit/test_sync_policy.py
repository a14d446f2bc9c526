"""Methods, styles, and who needs a sync when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.client.sync_policy import is_new
from syncd.protocol.presence import RunningStatus
from syncd.synchronizer import (
    SyncMethod,
    SyncStyle,
    explorer_needs_sync,
    should_load,
    trainer_needs_sync,
)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("nccl", SyncMethod.NCCL),
        ("NCCL", SyncMethod.NCCL),
        ("Online", SyncMethod.NCCL),
        ("offline", SyncMethod.CHECKPOINT),
        ("CheckPoint", SyncMethod.CHECKPOINT),
        ("memory", SyncMethod.MEMORY),
    ],
)
def test_sync_methods_accept_aliases_in_any_case(name, method):
    assert SyncMethod(name) is method


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("fixed", SyncStyle.FIXED),
        ("Trainer_Driven", SyncStyle.TRAINER_DRIVEN),
        ("dynamic_by_trainer", SyncStyle.TRAINER_DRIVEN),
        ("DYNAMIC_BY_EXPLORER", SyncStyle.EXPLORER_DRIVEN),
        ("explorer_driven", SyncStyle.EXPLORER_DRIVEN),
        ("fully_async", SyncStyle.FULLY_ASYNC),
    ],
)
def test_sync_styles_accept_aliases_in_any_case(name, style):
    assert SyncStyle(name) is style


@pytest.mark.parametrize("kind", [SyncMethod, SyncStyle, RunningStatus])
@pytest.mark.parametrize("name", ["", "carrier pigeon", None, 3])
def test_unknown_methods_and_styles_are_refused(kind, name):
    with pytest.raises(ValueError, match="is not a valid"):
        kind(name)


@pytest.mark.parametrize(
    ("current", "offered", "load"),
    [(-1, 0, False), (-1, 3, True), (2, 4, True), (3, 3, False), (8, 4, True), (5, 0, False), (0, 0, False)],
)
def test_an_explorer_loads_any_other_published_step(current, offered, load):
    assert should_load(current, offered) is load


@pytest.mark.parametrize(
    ("current", "known", "offered", "new"),
    [
        (-1, None, (1, 0), False),
        (-1, None, (1, 3), True),
        (2, (1, 2), (1, 4), True),
        (3, (1, 3), (1, 3), False),
        (8, (1, 8), (2, 4), True),
        (4, (1, 4), (2, 4), True),
        (8, (1, 8), (2, 0), True),
        (8, None, (2, 0), True),
        (3, None, (1, 3), False),
        (6, (1, 8), (1, 8), True),
        (4, (2, 4), (1, 8), False),
    ],
)
def test_newness_follows_from_the_current_known_and_offered_pair(current, known, offered, new):
    assert is_new(current, known, offered) is new


PAIRS = st.tuples(st.integers(1, 5), st.integers(0, 20))


@given(PAIRS, PAIRS)
def test_only_a_higher_pair_is_new_after_a_known_one(known, offered):
    assert is_new(known[1], known, offered) is (offered > known)


@pytest.mark.parametrize(
    ("interval", "offset", "steps"),
    [(1, 0, [1, 2, 3, 4, 5, 6]), (2, 0, [2, 4, 6]), (2, 1, [3, 5]), (3, 2, [5])],
)
def test_an_explorer_syncs_at_its_interval_after_its_offset(interval, offset, steps):
    assert [step for step in range(7) if explorer_needs_sync(step, interval, offset)] == steps


@pytest.mark.parametrize("style", [SyncStyle.FIXED, SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC])
def test_a_trainer_driven_sync_happens_once_per_interval(style):
    assert trainer_needs_sync(style, 4, 2, 2)
    assert not trainer_needs_sync(style, 4, 4, 2)
    assert not trainer_needs_sync(style, 5, 4, 2, explorer_asks=True)


def test_an_explorer_driven_sync_happens_when_asked_for_an_unsynced_step():
    assert trainer_needs_sync(SyncStyle.EXPLORER_DRIVEN, 5, 4, 2, explorer_asks=True)
    assert not trainer_needs_sync(SyncStyle.EXPLORER_DRIVEN, 6, 4, 2)
    assert not trainer_needs_sync(SyncStyle.EXPLORER_DRIVEN, 5, 5, 2, explorer_asks=True)
