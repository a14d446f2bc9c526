"""What a stage does about steps that are being written: properties of the decision over random snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from syncd.parts.early.decision import (
    LOST,
    STILL,
    UNUSED,
    WASTED,
    AttemptKey,
    Begin,
    CopyState,
    Drop,
    EarlySnapshot,
    SeenAttempt,
    decide,
)
from syncd.protocol.write_progress import WriteProgress

KEYS = st.builds(AttemptKey, st.integers(0, 3), st.sampled_from("ab"))
SECONDS = st.floats(0, 2 * UNUSED)
NOTES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=3).map(
    lambda notes: tuple(
        WriteProgress("a", writers, f"s{place}", ".x.tmp", size, 0)
        for place, (writers, size) in enumerate(notes)
    )
)
ATTEMPTS = st.builds(SeenAttempt, KEYS, NOTES, st.none() | SECONDS)
HELD = st.builds(
    CopyState, KEYS, st.none() | SECONDS, SECONDS, st.booleans(), st.booleans(), st.booleans(), st.booleans()
)
SNAPSHOTS = st.builds(
    EarlySnapshot,
    st.lists(ATTEMPTS, max_size=4).map(tuple),
    st.none() | HELD,
    st.frozensets(KEYS),
    st.integers(0, 3),
    st.integers(0, 20),
)


@given(SNAPSHOTS)
def test_what_is_begun_is_new_moving_and_has_room(seen: EarlySnapshot) -> None:
    action = decide(seen)
    if not isinstance(action, Begin):
        return
    assert seen.held is None
    assert action.key not in seen.tried
    assert seen.wasted < WASTED
    begun = [attempt for attempt in seen.attempts if attempt.key == action.key]
    assert any(
        one.notes and one.changed_ago is not None and one.changed_ago < STILL and one.size <= seen.free
        for one in begun
    )


@given(SNAPSHOTS)
def test_what_cannot_be_used_any_more_goes(seen: EarlySnapshot) -> None:
    held, action = seen.held, decide(seen)
    if held is not None and (held.is_revoked or held.is_other or held.is_staged):
        assert isinstance(action, Drop)


@given(SNAPSHOTS)
def test_no_copy_is_held_for_ever(seen: EarlySnapshot) -> None:
    held, action = seen.held, decide(seen)
    if held is None:
        return
    if held.is_sealed:
        is_over = held.gone_for >= UNUSED
    else:
        is_over = held.gone_for >= LOST if held.changed_ago is None else held.changed_ago >= STILL
    if is_over:
        assert isinstance(action, Drop)


@given(SNAPSHOTS)
def test_a_copy_that_is_of_use_stays(seen: EarlySnapshot) -> None:
    held, action = seen.held, decide(seen)
    if held is None or held.is_revoked or held.is_other or held.is_staged or held.is_sealed:
        return
    is_moving = held.changed_ago is not None and held.changed_ago < STILL
    is_being_sealed = held.changed_ago is None and held.gone_for < LOST
    if is_moving or is_being_sealed:
        assert action is None


@given(SNAPSHOTS)
def test_without_attempts_nothing_is_begun(seen: EarlySnapshot) -> None:
    empty = EarlySnapshot((), seen.held, seen.tried, seen.wasted, seen.free)
    assert not isinstance(decide(empty), Begin)


def test_writers_that_have_not_begun_count_with_the_largest_size() -> None:
    notes = tuple(WriteProgress("a", 4, f"s{size}", ".x.tmp", size, 0) for size in (3, 7))
    assert SeenAttempt(AttemptKey(1, "a"), notes, 0.0).size == 3 + 7 + 2 * 7


def test_the_newest_step_is_begun() -> None:
    note = (WriteProgress("a", 1, "s", ".x.tmp", 1, 0),)
    attempts = tuple(SeenAttempt(AttemptKey(step, "a"), note, 0.0) for step in (4, 6, 5))
    assert decide(EarlySnapshot(attempts, None, frozenset(), 0, 1)) == Begin(AttemptKey(6, "a"))


def test_a_copy_that_no_engine_took_makes_room_for_the_next_step() -> None:
    note = (WriteProgress("a", 1, "s", ".x.tmp", 1, 0),)
    following = (SeenAttempt(AttemptKey(6, "a"), note, 0.0),)
    held = CopyState(AttemptKey(5, "a"), gone_for=1.0, is_sealed=True)
    assert isinstance(decide(EarlySnapshot(following, held, frozenset(), 0, 0)), Drop)
    assert decide(EarlySnapshot((), held, frozenset(), 0, 1)) is None
