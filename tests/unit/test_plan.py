"""The plan: what is published, and when explorers go back. All pure, so every case is a snapshot."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import complete, filling, published, snapshot

from syncd.config import DaemonConfig
from syncd.daemon.plan import ROOM, Mirrored, plan, still_holds
from syncd.daemon.retention import decide
from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.presence import Presence
from syncd.protocol.request import Pin, Request
from syncd.protocol.step import StepState
from syncd.protocol.version import parse_marker

POLICY = DaemonConfig()


def pair(snapshot: Snapshot, policy: DaemonConfig = POLICY):
    version = plan(snapshot, policy).publish
    return version.pair if version else None


def test_the_first_step_starts_the_first_generation():
    assert pair(snapshot(complete(3), marker=3)) == (1, 3)


def test_nothing_is_published_in_an_empty_job():
    assert plan(snapshot(), POLICY) == plan(snapshot(), POLICY)
    assert pair(snapshot()) is None


def test_a_newer_step_keeps_the_generation():
    assert pair(snapshot(complete(3), complete(4), marker=4, version=published(complete(3), 7))) == (7, 4)


def test_a_published_step_is_not_published_again():
    assert pair(snapshot(complete(3), marker=3, version=published(complete(3)))) is None


@pytest.mark.fault("an empty or torn marker starves the loop")
@pytest.mark.parametrize(
    "text", [b"", b"\n", b"not a number", b"-3", b"9" * 400, b"\xff\xfe", b"1e3", b"0x10", b"4.0"]
)
def test_a_newer_step_is_published_despite_a_bad_marker(text):
    """The manifest is the truth: a sealed newer step is published whatever the marker holds, and it is said."""
    looked = snapshot(complete(3), complete(4), marker=text, version=published(complete(3)))
    assert pair(looked) == (1, 4)
    assert "marker" in dict(plan(looked, POLICY).problems)


@pytest.mark.fault("a marker moving back is ignored")
def test_a_marker_that_names_an_earlier_step_is_a_rewind():
    looked = snapshot(complete(3), complete(5), marker=3, version=published(complete(5), 2))
    assert pair(looked) == (3, 3)
    assert plan(looked, POLICY).reason == "rewind"


def test_a_rewind_waits_until_the_marker_is_stable():
    looked = snapshot(
        complete(1), complete(12), marker=1, version=published(complete(12)), marker_stable_for=0.0
    )
    assert pair(looked) is None
    assert plan(looked, POLICY).due_in == POLICY.rewind_settle


def test_a_bad_marker_never_rewinds():
    assert pair(snapshot(complete(3), marker=b"", version=published(complete(5)))) is None


def test_abandoned_steps_are_no_longer_newest_even_without_a_marker():
    first = snapshot(complete(3), complete(5), complete(6), marker=3, version=published(complete(6)))
    version = plan(first, POLICY).publish
    assert version is not None
    assert version.abandoned == ((5, complete(5).digest), (6, complete(6).digest))
    assert pair(replace(first, version=version, marker=parse_marker(b"garbage"))) is None
    assert pair(snapshot(complete(3), complete(5), complete(6), marker=b"", version=version)) is None


def test_a_step_written_again_after_a_rewind_is_newest_again():
    abandoned = ((5, complete(5).digest),)
    version = published(complete(3), 2, abandoned=abandoned)
    again = complete(5, digest="sha256:" + "f" * 64)
    assert pair(snapshot(complete(3), again, marker=5, version=version)) == (2, 5)


def test_an_abandoned_step_that_the_marker_names_is_newest_again():
    version = published(complete(3), 2, abandoned=((5, complete(5).digest),))
    assert pair(snapshot(complete(3), complete(5), marker=5, version=version)) == (2, 5)


@pytest.mark.fault("the ready mark is visible before its data")
@pytest.mark.fault("a payload that is late behind its marker kills the watcher silently")
def test_a_marker_ahead_of_its_step_is_reported_as_a_problem():
    looked = snapshot(complete(3), filling(4), marker=4, version=published(complete(3)))
    assert pair(looked) is None
    assert "ahead of its step" in dict(plan(looked, POLICY).problems)["marker"]


def test_a_briefly_torn_marker_is_not_a_problem():
    looked = snapshot(complete(3), marker=b"", version=published(complete(3)), marker_stable_for=0.2)
    assert plan(looked, POLICY).problems == ()


def test_a_missing_marker_is_a_problem_once_a_step_is_sealed():
    first, sealed = (
        snapshot(step, marker=None, marker_stable_for=60.0) for step in (filling(1), complete(1))
    )
    assert plan(first, POLICY).problems == ()
    assert dict(plan(sealed, POLICY).problems)["marker"] == "missing"


def test_intermediate_steps_are_published_while_the_marker_is_ahead():
    assert pair(snapshot(complete(3), complete(4), filling(6), marker=6, version=published(complete(3)))) == (
        1,
        4,
    )


def test_a_sealed_step_waits_for_its_marker():
    assert pair(snapshot(complete(3), complete(4), marker=3, version=published(complete(3)))) is None


def test_a_damaged_published_step_is_reported_without_a_rewind():
    broken = replace(complete(5), state=StepState.DAMAGED)
    looked = snapshot(complete(3), broken, marker=5, version=published(complete(5)))
    assert pair(looked) is None
    assert "published_step" in dict(plan(looked, POLICY).problems)


@pytest.mark.fault("a restart below an explorer's version asserts")
def test_a_lost_version_file_never_lets_the_pair_decrease():
    assert pair(snapshot(complete(3), marker=3, floor=(4, 9))) == (5, 3)


@pytest.mark.fault("out-of-order publishes assert")
def test_a_step_below_the_published_one_is_not_published():
    assert pair(snapshot(complete(3), complete(5), marker=5, version=published(complete(5)))) is None


def test_a_step_with_changed_content_is_a_new_generation():
    other = complete(5, digest="sha256:" + "e" * 64)
    assert pair(snapshot(other, marker=5, version=published(complete(5)))) == (2, 5)


def test_a_rollback_publishes_a_generation_and_holds_until_the_marker_moves():
    request = Request("rollback", 3, "r1")
    looked = snapshot(complete(3), complete(5), marker=5, version=published(complete(5)), requests=(request,))
    decided = plan(looked, POLICY)
    assert decided.publish is not None
    assert decided.publish.pair == (2, 3)
    assert [answer.done for answer in decided.answers] == [True]
    held = replace(looked, version=decided.publish, requests=())
    assert pair(held) is None
    assert pair(snapshot(complete(3), complete(5), complete(6), marker=6, version=decided.publish)) == (2, 6)


def test_a_rollback_is_not_carried_out_twice():
    request = Request("rollback", 3, "r1")
    version = published(complete(3), 2, request="r1", held_marker="5")
    decided = plan(snapshot(complete(3), complete(5), marker=5, version=version, requests=(request,)), POLICY)
    assert decided.publish is None
    assert [answer.done for answer in decided.answers] == [True]


@pytest.mark.parametrize("target", [4, 7])
def test_a_rollback_to_an_incomplete_step_is_refused(target):
    looked = snapshot(
        complete(3), filling(4), complete(5), marker=5, version=published(complete(5)),
        requests=(Request("rollback", target, "r1"),),
    )  # fmt: skip
    decided = plan(looked, POLICY)
    assert decided.publish is None
    assert [answer.done for answer in decided.answers] == [False]


def test_a_vacate_request_is_answered_once_its_step_is_removed():
    request = Request("vacate", 5, "v1")
    version = published(complete(3), 2, previous=(1, 5), abandoned=((5, complete(5).digest),))
    looked = snapshot(complete(3), complete(5), marker=3, version=version, requests=(request,))
    decided = plan(looked, POLICY)
    assert decided.answers == ()
    assert {d.step: d.rule for d in decided.decisions if not d.keep} == {5: "vacated"}
    gone = snapshot(complete(3), marker=3, version=version, requests=(request,))
    assert [answer.done for answer in plan(gone, POLICY).answers] == [True]


@pytest.mark.parametrize(("keeps", "answers"), [("", []), ("lease", []), ("pin", [False])])
def test_a_step_is_vacated_with_the_deltas_of_it_unless_one_is_kept_for_good(keeps, answers):
    """The trainer has gone back to step 3 and writes 4 again; 5 and 6 are stored as changes of the old 4."""
    deltas = [replace(complete(n), kind="delta", parent=n - 1) for n in (5, 6)]
    old = tuple((step.step, step.digest) for step in (complete(4), *deltas))
    version = published(complete(3), 2, previous=(1, 6), abandoned=old)
    looked = snapshot(
        complete(3), complete(4), *deltas,
        marker=3, version=version, requests=(Request("vacate", 4, "v1"),),
        explorers={"e": Module(Presence("e", leases=(6,) if keeps == "lease" else ()), alive=True)},
        pins={6: Pin(6)} if keeps == "pin" else {},
    )  # fmt: skip
    decided = plan(looked, POLICY)
    assert [answer.done for answer in decided.answers] == answers
    removed = {d.step: d.rule for d in decided.decisions if not d.keep}
    assert removed == ({} if keeps else dict.fromkeys((4, 5, 6), "vacated"))


def test_vacating_the_newest_version_is_refused_without_a_rewind():
    request = Request("vacate", 5, "v1")
    here = snapshot(complete(5), marker=5, version=published(complete(5)), requests=(request,))
    assert [answer.done for answer in plan(here, POLICY).answers] == [False]
    back = snapshot(complete(5), marker=4, version=published(complete(5)), requests=(request,))
    assert plan(back, POLICY).answers == ()


def test_a_step_without_its_own_marker_is_published_once_it_is_stable():
    export = complete(10, layout="huggingface", announced_by="time")
    assert pair(snapshot(export)) is None
    assert plan(snapshot(export), POLICY).due_in == POLICY.settle
    assert pair(snapshot(replace(export, unchanged_for=5.0))) == (1, 10)


def test_a_foreign_step_is_published_only_if_the_marker_or_tracker_names_it():
    step = complete(4, layout="trinity-0.6", announced_by="marker")
    assert pair(snapshot(step)) is None
    assert pair(snapshot(step, marker=3)) is None
    assert pair(snapshot(step, marker=4)) == (1, 4)
    assert pair(snapshot(step, tracker=4)) == (1, 4)


states = st.sampled_from(list(StepState))
steps = st.lists(
    st.tuples(st.integers(0, 12), states, st.booleans(), st.integers(0, 2)),
    max_size=10,
    unique_by=lambda item: item[0],
)


@st.composite
def snapshots(draw):
    found = {
        number: replace(complete(number, digest=f"sha256:{salt:064x}"), state=state, full=full)
        for number, state, full, salt in draw(steps)
    }
    marker = draw(st.one_of(st.none(), st.integers(0, 13), st.just(b"junk")))
    version = None
    if draw(st.booleans()):
        at = draw(st.integers(0, 12))
        version = replace(
            published(complete(at), draw(st.integers(1, 4))), previous=(1, draw(st.integers(0, 12)))
        )
    floor = (draw(st.integers(1, 5)), draw(st.integers(0, 12))) if draw(st.booleans()) else None
    requests = tuple(
        Request(kind, number, f"r{place}")
        for place, (kind, number) in enumerate(
            draw(st.lists(st.tuples(st.sampled_from(["rollback", "vacate"]), st.integers(0, 13)), max_size=2))
        )
    )
    return snapshot(
        *found.values(), marker=marker, version=version, floor=floor, requests=requests,
        marker_stable_for=draw(st.sampled_from([0.0, 5.0])),
    )  # fmt: skip


@given(snapshots())
@settings(max_examples=400)
def test_only_complete_steps_are_published_and_the_pair_increases(looked):
    version = plan(looked, POLICY).publish
    if version is None:
        return
    step = looked.steps[version.step]
    assert step.state is StepState.COMPLETE
    assert version.digest == step.digest
    known = [looked.version.pair] if looked.version else [looked.floor] if looked.floor else []
    assert all(version.pair > before for before in known)


@given(snapshots())
@settings(max_examples=400)
def test_planning_again_after_publishing_publishes_nothing(looked):
    """No state makes the daemon publish for ever."""
    version = plan(looked, POLICY).publish
    if version is None:
        return
    requests = tuple(request for request in looked.requests if request.kind != "rollback")
    again = replace(looked, version=version, floor=version.pair, requests=requests)
    assert plan(again, POLICY).publish is None


def test_a_plan_holds_while_only_time_passes():
    looked = snapshot(complete(3), complete(5), marker=5, version=published(complete(5)))
    later = replace(looked, marker_stable_for=looked.marker_stable_for + 60.0, steps=dict(looked.steps))
    assert still_holds(plan(looked, POLICY), looked, later, POLICY)
    assert not still_holds(plan(looked, POLICY), looked, replace(later, tracker=3), POLICY)


@given(
    snapshots(),
    snapshots(),
    st.sampled_from([None, "steps", "marker", "version", "requests", "floor"]),
    st.data(),
)
@settings(max_examples=400)
def test_a_plan_that_still_holds_equals_a_new_plan(looked, other, changed, data):
    later = replace(
        looked,
        marker_stable_for=data.draw(st.sampled_from([0.0, 0.5, 1.0, 5.0, 3599.0, 3600.0, 1e6])),
        **({changed: getattr(other, changed)} if changed else {}),
    )
    decided = plan(looked, POLICY)
    if still_holds(decided, looked, later, POLICY):
        assert plan(later, POLICY) == decided


def test_on_a_full_disk_removable_steps_are_removed_before_a_publish():
    old, before, newest, next_one = (complete(step) for step in (1, 2, 3, 4))
    version = published(newest, previous=(1, 2))
    roomy = snapshot(old, before, newest, next_one, marker=4, version=version, free=ROOM)
    policy = replace(POLICY, keep_last=1)
    assert plan(roomy, policy).first == ()
    for short in (replace(roomy, free=ROOM - 1), replace(roomy, crowded=True)):
        decided = plan(short, policy)
        assert decided.publish == plan(roomy, policy).publish
        assert [decision.step for decision in decided.first] == [1]


@given(snapshots())
@settings(deadline=None)
def test_steps_removed_before_a_publish_are_never_kept_ones(looked):
    decided = plan(replace(looked, crowded=True), POLICY)
    kept = {decision.step for decision in (*decide(looked, POLICY), *decided.decisions) if decision.keep}
    assert not kept & {decision.step for decision in decided.first}


# --- jobs that a mirror leads ---------------------------------------------------------------------------------------


def mirrored_pair(snapshot, wanted):
    version = plan(snapshot, POLICY, Mirrored(wanted)).publish
    return version.pair if version else None


def test_a_mirrored_job_repeats_its_sources_pair_and_nothing_else():
    looked = snapshot(complete(3), complete(5), marker=5, version=published(complete(3), 2))
    assert mirrored_pair(looked, None) is None
    assert mirrored_pair(looked, published(complete(5), 4)) == (4, 5)
    assert mirrored_pair(looked, published(complete(3), 3)) == (3, 3)
    assert mirrored_pair(looked, published(complete(3), 2)) is None
    assert mirrored_pair(looked, published(complete(3), 1)) is None


def test_a_mirrored_job_publishes_only_the_content_that_its_source_has_published():
    looked = snapshot(complete(3), filling(5), marker=5, version=published(complete(3)))
    assert mirrored_pair(looked, published(complete(5))) is None
    other = replace(published(complete(3), 2), digest="sha256:other")
    assert mirrored_pair(looked, other) is None


def test_a_mirrored_job_never_goes_below_a_pair_that_somebody_has_seen():
    looked = replace(snapshot(complete(3), complete(5), version=published(complete(3))), floor=(2, 9))
    assert mirrored_pair(looked, published(complete(5), 2)) is None
    assert mirrored_pair(looked, published(complete(5), 3)) == (3, 5)


def test_a_mirrored_job_that_goes_back_abandons_the_steps_above():
    looked = snapshot(complete(3), complete(5), marker=3, version=published(complete(5)))
    decided = plan(looked, POLICY, Mirrored(published(complete(3), 2)))
    assert decided.reason == "rewind"
    assert [step for step, _ in decided.publish.abandoned] == [5]


def test_a_mirrored_job_refuses_rollbacks_and_names_where_to_ask():
    looked = replace(
        snapshot(complete(3), complete(5), version=published(complete(5))), requests=(Request("rollback", 3),)
    )
    decided = plan(looked, POLICY, Mirrored(None))
    assert decided.publish is None
    assert [(answer.done, answer.detail) for answer in decided.answers] == [
        (False, "the job is a mirror: roll back at its source")
    ]
