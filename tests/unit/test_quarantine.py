"""Quarantine: which steps are put aside, what the last good version is, and what both change. All pure."""

from dataclasses import replace

import pytest
from support.builders import complete, filling, published, snapshot

from syncd.config import DaemonConfig
from syncd.daemon.plan import plan
from syncd.daemon.quarantine import MOST
from syncd.daemon.retention import decide
from syncd.daemon.snapshot import Module
from syncd.protocol.engine_state import EngineReport, EngineState, GivenUp, Proof
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.request import Request
from syncd.protocol.step import StepState
from syncd.protocol.version import GoodVersion, Quarantined, engine_label

POLICY = DaemonConfig()
REASON = "it does not fit the engine"


def digest(step):
    return complete(step).digest


def engine(applied=None, state=None, gave_up=(), proven=None, alive=True, **presence):
    """Return an explorer that has given up these steps and runs this pair, which it may have proven."""
    proof = None if proven is None else Proof(proven, 0.0, 0.0, 0.1, None, 60, 0.1)
    found = state or (EngineState.REFUSED if gave_up else EngineState.LOADED)
    refused = tuple(GivenUp(step, digest(step), REASON, refused=True) for step in gave_up)
    report = EngineReport(found, proof=proof, given_up=refused)
    known = digest(applied[1]) if applied else ""
    made = Presence("e", applied=applied, info=report.document(), **presence)
    return Module(replace(made, applied_digest=presence.get("applied_digest", known)), alive)


def job(*engines, newest=5, steps=(4, 5), version=None, **more):
    found = version or published(complete(newest), previous=(1, newest - 1))
    explorers = {f"e{number}": one for number, one in enumerate(engines)}
    return snapshot(*map(complete, steps), marker=newest, version=found, explorers=explorers, **more)


def after(looked, policy=POLICY):
    """Return the version file after the plan is carried out."""
    decided = plan(looked, policy)
    return decided.publish or decided.amend or looked.version


def put_aside(looked):
    return [one.step for one in after(looked).quarantine]


def test_a_step_that_both_engines_gave_up_is_put_aside():
    looked = job(engine((1, 4), gave_up=[5]), engine((1, 4), gave_up=[5]))
    decided = plan(looked, POLICY)
    assert decided.publish is None
    assert decided.amend.quarantine == (Quarantined(5, digest(5), f"2 engines gave it up: {REASON}"),)
    assert (decided.amend.pair, decided.amend.digest) == (looked.version.pair, looked.version.digest)


@pytest.mark.parametrize(
    "others",
    [
        [],
        [engine((1, 5))],
        [engine((1, 4), gave_up=[5], alive=False)],
        [engine((1, 4), gave_up=[5], status=RunningStatus.STOPPED)],
        [engine((1, 4), gave_up=[5]), engine((1, 5))],
        [engine((1, 4), gave_up=[5]), engine((1, 6), applied_digest=digest(6))],
        [engine((1, 4), gave_up=[5]), engine((1, 4), loading=(1, 5))],
        [engine((1, 4), gave_up=[5]), engine((1, 4), leases=(5,))],
        [engine((1, 4), gave_up=[5]), engine((1, 4), EngineState.LOADING)],
        [engine((1, 4), gave_up=[5]), engine((1, 4), EngineState.FAILED)],
        [engine((1, 4), gave_up=[5]), Module(Presence("plain", applied=(1, 5)))],
    ],
    ids=[
        *(
            "alone",
            "another-runs-it",
            "another-is-dead",
            "another-has-stopped",
            "third-runs-it",
            "third-is-later",
        ),
        *("third-loads-it", "third-leases-it", "third-begins", "third-may-retry", "third-says-no-more"),
    ],
)
def test_a_step_is_not_put_aside_while_an_engine_may_run_it(others):
    assert put_aside(job(engine((1, 4), gave_up=[5]), *others)) == []


def test_engines_that_have_not_tried_do_not_count():
    waiting = engine(None, EngineState.WAITING)
    looked = job(*[engine((1, 4), gave_up=[5])] * 2, waiting, engine((1, 4)), Module(Presence("plain")))
    assert put_aside(looked) == [5]


def test_a_step_with_other_content_is_not_meant():
    rewritten = complete(5, digest="sha256:" + "e" * 64)
    looked = replace(job(*[engine((1, 4), gave_up=[5])] * 2), steps={4: complete(4), 5: rewritten})
    assert after(looked).pair == (2, 5)
    assert put_aside(looked) == []


def test_a_step_that_is_written_again_leaves_the_quarantine():
    version = published(complete(4), quarantine=(Quarantined(5, digest(5), "damaged"),))
    again = complete(5, digest="sha256:" + "e" * 64)
    looked = snapshot(complete(4), again, marker=5, version=version)
    assert (after(looked).pair, put_aside(looked)) == ((1, 5), [])
    assert put_aside(snapshot(complete(4), filling(5), marker=4, version=version)) == [5]


def test_damage_that_the_daemon_has_read_twice_is_put_aside():
    broken = replace(complete(5), state=StepState.DAMAGED, problem="one byte differs", rejected=True)
    looked = snapshot(complete(4), broken, marker=5, version=published(complete(4)))
    assert after(looked).quarantine == (Quarantined(5, digest(5), "damaged: one byte differs"),)
    seen = replace(broken, rejected=False)
    assert put_aside(snapshot(complete(4), seen, marker=5, version=published(complete(4)))) == []


def test_a_quarantined_step_is_not_published_and_a_later_one_is():
    version = published(complete(4), quarantine=(Quarantined(5, digest(5), "damaged"),))
    assert after(snapshot(complete(4), complete(5), marker=5, version=version)) == version
    later = after(snapshot(complete(4), complete(5), complete(6), marker=6, version=version))
    assert (later.pair, [one.step for one in later.quarantine]) == ((1, 6), [5])


def test_the_trainer_may_go_back_to_a_quarantined_step():
    version = published(complete(5), quarantine=(Quarantined(4, digest(4), "2 engines gave it up"),))
    assert after(snapshot(complete(4), complete(5), marker=4, version=version)).pair == (2, 4)


def test_nothing_changes_once_it_is_written():
    looked = job(engine((1, 4), gave_up=[5]), engine((1, 4), gave_up=[5]))
    again = plan(replace(looked, version=after(looked)), POLICY)
    assert (again.publish, again.amend) == (None, None)


def test_it_outlives_the_presences():
    looked = job(engine((1, 4), gave_up=[5]), engine((1, 4), gave_up=[5]))
    assert put_aside(replace(looked, version=after(looked), explorers={})) == [5]


def test_a_rollback_takes_a_step_out_of_quarantine_and_engines_cannot_put_it_back():
    looked = job(engine((1, 4), gave_up=[5]), engine((1, 4), gave_up=[5]))
    asked = replace(looked, version=after(looked), requests=(Request("rollback", 5, "r1"),))
    decided = plan(asked, POLICY)
    assert (decided.publish.pair, decided.publish.quarantine) == ((2, 5), ())
    assert decided.publish.released == ((5, digest(5)),)
    assert put_aside(replace(asked, version=decided.publish, requests=())) == []
    # Who asks before the daemon has put it aside means the same.
    assert put_aside(replace(asked, version=looked.version)) == []


def test_a_bounded_number_of_entries_is_kept_those_of_steps_that_exist_first():
    before = tuple(Quarantined(step, digest(step), "damaged") for step in range(10, 10 + MOST))
    looked = job(*[engine((1, 4), gave_up=[5])] * 2)
    found = replace(
        looked, version=after(replace(looked, version=replace(looked.version, quarantine=before)))
    )
    assert put_aside(found) == [5, *range(11, 10 + MOST)]
    assert plan(found, POLICY).amend is None


def test_more_damaged_steps_than_entries_do_not_change_the_file_each_time():
    steps = [
        replace(complete(step), state=StepState.DAMAGED, problem="it differs", rejected=True)
        for step in range(10, 20 + MOST)
    ]
    looked = snapshot(complete(4), *steps, marker=4, version=published(complete(4)))
    found = replace(looked, version=after(looked))
    assert put_aside(found) == [*range(20, 20 + MOST)]
    assert plan(found, POLICY).amend is None


def test_nothing_is_amended_while_there_is_no_room():
    looked = job(*[engine((1, 4), gave_up=[5])] * 2)
    assert plan(replace(looked, crowded=True), POLICY).amend is None
    assert plan(replace(looked, free=1000), POLICY).amend is None


# --- the last good version ---


def good(step, generation=1):
    return GoodVersion(generation, step, "weights", complete(step).payload, digest(step))


def label(step):
    return engine_label((1, step), digest(step))


def test_the_newest_proven_version_is_the_last_good_one():
    five = engine((1, 5), EngineState.PROVEN, proven=label(5))
    four = engine((1, 4), EngineState.PROVEN, proven=label(4))
    assert after(job(four, five)).last_good == good(5)
    assert after(job(four, engine((1, 5)))).last_good == good(4), "one that can prove has not proven it yet"


def test_where_nothing_can_be_proven_the_newest_loaded_version_is_the_last_good_one():
    assert after(job(engine((1, 4)), engine((1, 5)))).last_good == good(5)
    assert after(job(Module(Presence("plain", applied=(1, 5))))).last_good == good(5)
    met = engine((1, 5), EngineState.LOADED, proven=label(4))
    assert after(job(met)).last_good == good(5), "its version came without a probe"


def test_an_engine_that_went_back_to_a_proven_version_shows_that_one():
    back = engine((1, 4), EngineState.FAILED, gave_up=[5], proven=label(4))
    found = after(job(back, back))
    assert (found.last_good, put_aside(job(back, back))) == (good(4), [5])


@pytest.mark.parametrize(
    "one",
    [
        engine((1, 4), EngineState.WRONG),
        engine((1, 4), alive=False),
        engine((1, 4), applied_digest="sha256:" + "e" * 64),
        engine((1, 6)),
        engine(None, EngineState.WAITING),
    ],
    ids=["wrong", "dead", "other-content", "never-published", "start-model"],
)
def test_what_is_not_shown_is_not_good(one):
    assert after(job(one)).last_good is None


def test_it_is_carried_over_until_a_later_one_is_shown():
    version = published(complete(5), last_good=good(4))
    looked = snapshot(*map(complete, (4, 5, 6)), marker=6, version=version)
    assert (after(looked).pair, after(looked).last_good) == ((1, 6), good(4))


def test_a_version_from_which_the_trainer_has_gone_back_is_not_good():
    version = published(complete(5), last_good=good(5))
    looked = snapshot(complete(3), complete(5), marker=3, version=version)
    assert (after(looked).pair, after(looked).last_good) == ((2, 3), None)
    assert after(snapshot(complete(6), marker=6, version=version)).last_good is None, "its step has gone"


# --- retention ---


def rules(looked, **policy):
    return {one.step: ("" if one.keep else "-") + one.rule for one in decide(looked, DaemonConfig(**policy))}


def test_the_last_good_version_is_kept_and_quarantined_steps_do_not_count():
    aside = tuple(Quarantined(step, digest(step), "2 engines gave it up") for step in (6, 7, 8))
    version = published(complete(9), previous=(1, 8), quarantine=aside, last_good=good(2))
    looked = snapshot(*map(complete, range(1, 10)), marker=9, version=version)
    assert rules(looked, keep_last=3) == {
        1: "-superseded",
        2: "last_good",
        3: "-superseded",
        4: "keep_last",
        5: "keep_last",
        6: "-quarantined",
        7: "-quarantined",
        8: "previous_version",
        9: "newest_version",
    }
    assert rules(looked, keep_last=3, max_bytes=1)[2] == "last_good"
    rewritten = {**looked.steps, 2: complete(2, digest="sha256:" + "e" * 64)}
    assert rules(replace(looked, steps=rewritten), keep_last=1)[2] == "-superseded"


def test_a_trainer_that_writes_the_last_good_step_again_need_not_wait():
    version = published(complete(5), previous=(1, 4), last_good=good(4))
    asked = Request("vacate", 4, "v", digest=digest(4))
    looked = snapshot(*map(complete, (3, 4, 5)), marker=3, version=version, requests=(asked,))
    decided = plan(replace(looked, version=published(complete(3), 2, last_good=good(4))), POLICY)
    assert {one.step: one.rule for one in decided.decisions}[4] == "vacated"


def test_on_a_full_disk_the_last_good_step_stays_until_the_version_no_longer_names_it():
    version = published(complete(5), previous=(1, 2), last_good=good(4))
    asked = Request("vacate", 4, "v", digest=digest(4))
    looked = snapshot(
        *map(complete, (1, 3, 4, 5)), marker=3, version=version, requests=(asked,), crowded=True
    )
    decided = plan(looked, replace(POLICY, keep_last=1))
    assert (decided.publish.pair, decided.publish.last_good) == ((2, 3), None)
    assert {one.step: one.rule for one in decided.decisions}[4] == "vacated"
    assert [one.step for one in decided.first] == [1]
