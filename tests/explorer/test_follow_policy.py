"""Which version is next: the table of policies and lags."""

import pytest

from explorer_hooks.follower.policy import (
    FollowPolicy,
    FollowSnapshot,
    choose_version,
    decide,
    has_passed,
    is_done,
    is_within,
    lag_of,
    needs_steps,
    parse_policy,
)
from syncd.errors import ConfigError

N, E = FollowPolicy(), FollowPolicy("every")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("newest", N),
        ("every", E),
        ("exact=7", FollowPolicy("exact", 7)),
        ("at-least=0", FollowPolicy("at-least", 0)),
        (" newest ", N),
    ],
)
def test_a_policy_is_read_from_its_text(text, policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text", ["", "latest", "exact", "exact=", "exact=-1", "newest=3", "exact=9999999999999999"]
)
def test_an_unknown_policy_is_refused(text):
    with pytest.raises(ConfigError, match="no policy"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("policy", "situation", "chosen"),
    [
        (N, FollowSnapshot(None), None),
        (N, FollowSnapshot((1, 3)), (1, 3)),
        (N, FollowSnapshot((1, 3), (1, 2)), (1, 3)),
        (N, FollowSnapshot((1, 3), (1, 3)), None),
        (N, FollowSnapshot((1, 3), (1, 3), again=True), (1, 3)),
        (N, FollowSnapshot((2, 1), (1, 3)), (2, 1)),
        (N, FollowSnapshot((1, 3), (1, 2), skipped=frozenset({(1, 3)})), None),
        (E, FollowSnapshot((1, 5), None, steps=(2, 4)), (1, 2)),
        (E, FollowSnapshot((1, 5), (1, 2), steps=(2, 4)), (1, 4)),
        (E, FollowSnapshot((1, 5), (1, 2), steps=(2, 4), skipped=frozenset({(1, 4)})), (1, 5)),
        (E, FollowSnapshot((1, 5), (1, 4), again=True, steps=(2, 4)), (1, 4)),
        (E, FollowSnapshot((1, 5), (1, 4), again=True, steps=(2,)), (1, 5)),
        (E, FollowSnapshot((2, 5), (1, 7), steps=(2, 4)), (2, 5)),
        (E, FollowSnapshot((1, 5), (1, 5), steps=(2, 4)), None),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 3)), None),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 4)), (1, 4)),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 5), steps=(4,)), (1, 4)),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 5), (1, 4), steps=(4,)), None),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 5), steps=(3,)), None),
        (FollowPolicy("at-least", 4), FollowSnapshot((1, 3)), None),
        (FollowPolicy("at-least", 4), FollowSnapshot((1, 6), (1, 4)), (1, 6)),
    ],
)
def test_the_next_version_follows_from_policy_and_snapshot(policy, situation, chosen):
    assert choose_version(policy, situation) == chosen
    if situation.steps and chosen not in (None, situation.newest):
        assert needs_steps(policy, situation)


GOOD = {"quarantined": frozenset({5}), "last_good": (1, 4)}
"""Step 5 was put aside, and 4 is the last good version."""


@pytest.mark.parametrize(
    ("policy", "situation", "chosen"),
    [
        (N, FollowSnapshot((1, 5), **GOOD), (1, 4)),
        (N, FollowSnapshot((1, 5), (1, 3), **GOOD), (1, 4)),
        (N, FollowSnapshot((1, 5), (1, 4), **GOOD), None),
        (N, FollowSnapshot((1, 5), (1, 5), **GOOD), None),
        (N, FollowSnapshot((1, 5), (1, 4), again=True, **GOOD), (1, 4)),
        (N, FollowSnapshot((1, 5), (1, 5), again=True, can_restore=True, **GOOD), None),
        (N, FollowSnapshot((1, 5), (1, 5), again=True, **GOOD), (1, 4)),
        (N, FollowSnapshot((1, 5), skipped=frozenset({(1, 4)}), **GOOD), None),
        (N, FollowSnapshot((1, 5), quarantined=frozenset({5})), None),
        (N, FollowSnapshot((1, 6), **GOOD), (1, 6)),
        (N, FollowSnapshot((2, 5), (1, 7), **GOOD), None),
        (FollowPolicy("at-least", 4), FollowSnapshot((1, 5), **GOOD), (1, 4)),
        (FollowPolicy("at-least", 5), FollowSnapshot((1, 5), **GOOD), None),
        (FollowPolicy("exact", 5), FollowSnapshot((1, 5), **GOOD), (1, 5)),
        (E, FollowSnapshot((1, 5), (1, 3), steps=(2, 4), **GOOD), (1, 4)),
        (E, FollowSnapshot((1, 5), (1, 4), steps=(2, 4), **GOOD), None),
        (E, FollowSnapshot((1, 6), (1, 4), steps=(2, 4, 5), **GOOD), (1, 6)),
        (E, FollowSnapshot((2, 5), (1, 7), steps=(2, 4), **GOOD), None),
    ],
)
def test_a_quarantined_version_is_not_loaded_and_nothing_is_rolled_back(policy, situation, chosen):
    assert choose_version(policy, situation) == chosen


def test_an_engine_that_lost_a_quarantined_version_is_restored():
    assert decide(N, FollowSnapshot((1, 5), (1, 5), again=True, can_restore=True, **GOOD)) == "restore"


def test_the_steps_are_listed_only_if_the_policy_needs_them():
    assert not needs_steps(N, FollowSnapshot((1, 3)))
    assert not needs_steps(E, FollowSnapshot((1, 3), (1, 3)))
    assert not needs_steps(FollowPolicy("exact", 5), FollowSnapshot((1, 3)))


def test_policy_exact_is_done_at_its_step_or_has_passed_it():
    exact = FollowPolicy("exact", 4)
    assert is_done(exact, (2, 4))
    assert not is_done(exact, (1, 5))
    assert not is_done(N, (1, 4))
    assert has_passed(exact, FollowSnapshot((1, 5), steps=(3,)))
    assert not has_passed(exact, FollowSnapshot((1, 5), steps=(4,)))
    assert not has_passed(exact, FollowSnapshot((1, 4)))


@pytest.mark.parametrize(
    ("policy", "now", "decision"),
    [
        (N, FollowSnapshot(None), "wait"),
        (N, FollowSnapshot((1, 3)), (1, 3)),
        (N, FollowSnapshot((1, 3), (1, 3), applied=(1, 3)), "wait"),
        (N, FollowSnapshot((1, 3), (1, 3), again=True, can_restore=True), (1, 3)),
        (
            N,
            FollowSnapshot((1, 3), (1, 2), again=True, skipped=frozenset({(1, 3)}), can_restore=True),
            "restore",
        ),
        (
            N,
            FollowSnapshot(
                (1, 3), (1, 2), again=True, skipped=frozenset({(1, 3)}), can_restore=True, retries=True
            ),
            "wait",
        ),
        (
            N,
            FollowSnapshot((1, 3), (1, 2), again=True, skipped=frozenset({(1, 3)})),
            "wait",
        ),
        (
            FollowPolicy("exact", 4),
            FollowSnapshot((1, 4), (1, 4), applied=(1, 4)),
            "end",
        ),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 5), steps=(3,)), "missing"),
        (FollowPolicy("exact", 4), FollowSnapshot((1, 3)), "wait"),
    ],
)
def test_the_follower_s_decision_follows_from_policy_and_snapshot(policy, now, decision):
    assert decide(policy, now) == decision


@pytest.mark.parametrize(
    ("applied", "newest", "lag"),
    [
        (None, None, 0),
        ((1, 3), None, 0),
        (None, (1, 3), 3),
        ((1, 1), (1, 3), 2),
        ((1, 3), (1, 3), 0),
        ((1, 3), (2, 2), float("inf")),
    ],
)
def test_the_lag_of_an_engine_is_its_distance_to_the_newest_version(applied, newest, lag):
    assert lag_of(applied, newest) == lag
    assert is_within(applied, newest, None)
    assert is_within(applied, newest, 2) is (lag <= 2)
