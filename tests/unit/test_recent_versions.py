"""The versions that an engine has run of late, in its explorer's presence: bounded, and read whatever is there."""

from dataclasses import replace

from syncd.protocol.presence import KEPT_FOR, MOST_RECENT, RECENT, Presence, recent_of, with_recent


def confirmed(presence, pair, at, state="proven"):
    info = presence.info | {RECENT: with_recent(presence, pair, at, state)}
    return replace(presence, applied=pair, info=info)


def steps(presence):
    return [version.step for version in recent_of(presence)]


def test_each_confirmed_version_is_listed_once():
    presence = Presence("e0")
    for step in (1, 2, 2, 3):
        presence = confirmed(presence, (1, step), float(step))
    assert steps(presence) == [1, 2, 3]
    assert steps(confirmed(presence, None, 4.0)) == [1, 2, 3], "an engine that runs no version adds none"


def test_the_list_is_bounded_in_number_and_age():
    presence = Presence("e0")
    for step in range(3 * MOST_RECENT):
        presence = confirmed(presence, (1, step), step / 100)
    assert steps(presence) == list(range(2 * MOST_RECENT, 3 * MOST_RECENT))
    assert steps(confirmed(presence, (1, 999), 3 * MOST_RECENT / 100 + KEPT_FOR)) == [999]
    assert steps(confirmed(presence, (1, 999), -1000.0)) == [999], "a clock that was set back"


def test_entries_that_are_none_are_left_out():
    good = [1, 2, 3.5, None]
    odd = ["x", [1, 2], [1, 2, "3", None], [1, "2", 3.0, None], [1, 2, 3.0, 7], {}, None]
    huge = [[10**400, 2, 3.5, None], [1, 10**400, 3.5, None], [1, 2, 10**400, None], [1, 2, -(10**400), None]]
    assert recent_of(Presence("e0", info={RECENT: [*odd, *huge, good]})) == [(1, 2, 3.5, None)]
    assert recent_of(Presence("e0", info={RECENT: "all"})) == []
