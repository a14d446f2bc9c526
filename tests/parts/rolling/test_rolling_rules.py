"""Who may load now, as pure functions of what presences say; the document; the table and its errors."""

from dataclasses import replace

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from explorer_hooks.parts.rolling.turns import Other, goes_alone, is_admitted, target
from syncd.cli.options import daemon_options, read_config
from syncd.config import DaemonConfig, load
from syncd.daemon.retention import decide
from syncd.daemon.snapshot import Snapshot
from syncd.errors import ConfigError, CorruptDataError
from syncd.jobfile.loader import daemon_problems
from syncd.parts.rolling.admit import MOST_ADMITTED, SETTLE, Engine, Fleet, Policy, admit
from syncd.parts.rolling.daemon import inherited
from syncd.protocol.documents import SMALL_LIMIT, decode
from syncd.protocol.layout import Job
from syncd.protocol.rolling import Admission, StoppedVersion, Wave, encode_wave, wave_from
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import GoodVersion, Version

OLD, GOOD, NEW = [
    GoodVersion(1, step, "weights", f"global_step_{step}/actor", f"d{step}") for step in (40, 41, 42)
]
READABLE = frozenset((version.step, version.digest) for version in (OLD, GOOD, NEW))
POLICY = Policy(max_paused=1, canaries=1, patience=60.0)
BEFORE = Wave(candidate=GOOD, approved=GOOD)


def engine(name, applied=GOOD, **state):
    pair = applied.pair if applied else None
    return Engine(name, f"unit {name}", pair, **{"is_proven": True, "serves": applied is not None, **state})


def fleet(*engines, published=NEW, **more):
    return Fleet(engines, published, GOOD, readable=READABLE, **more)


def admitted(wave):
    return {name: slot.pair for name, slot in wave.admitted.items()}


def test_a_canary_gets_the_new_version_and_the_others_wait_for_it():
    wave = admit(fleet(engine("a"), engine("b"), engine("c")), POLICY, BEFORE, 10.0)
    assert (wave.phase, wave.candidate, wave.approved, admitted(wave)) == (
        "canary",
        NEW,
        GOOD,
        {"a": NEW.pair},
    )
    assert wave.waiting == ("b", "c")
    assert wave.why == "a must show first that 1.42 is good"


def test_once_the_canary_runs_it_the_others_get_it_one_after_the_other():
    before = admit(fleet(engine("a"), engine("b"), engine("c")), POLICY, BEFORE, 10.0)
    wave = admit(fleet(engine("a", NEW), engine("b"), engine("c", OLD)), POLICY, before, 20.0)
    assert (wave.phase, wave.approved, admitted(wave), wave.waiting) == (
        "rolling",
        NEW,
        {"c": NEW.pair},
        ("b",),
    )
    assert wave.why == "1 of 1 slots are taken"
    done = admit(fleet(*(engine(name, NEW) for name in "abc")), POLICY, wave, 30.0)
    assert (done.phase, done.admitted, done.waiting) == ("idle", {}, ())


def test_an_engine_that_has_proven_what_it_runs_is_a_canary_before_one_that_has_not():
    wave = admit(
        fleet(engine("a", is_proven=False), engine("b", applied=None, is_proven=False), engine("c")),
        POLICY,
        BEFORE,
        10.0,
    )
    assert admitted(wave) == {"c": NEW.pair}, "b runs nothing, and needs no slot for what is approved"


def test_without_a_probe_the_word_of_a_canary_counts_and_the_wave_says_so():
    before = admit(fleet(engine("a"), engine("b")), POLICY, BEFORE, 10.0)
    wave = admit(fleet(engine("a", NEW, is_proven=False), engine("b")), POLICY, before, 20.0)
    assert (wave.approved, wave.by_word) == (NEW, True)
    assert admit(fleet(engine("a", NEW), engine("b")), POLICY, before, 20.0).by_word is False


def test_a_version_that_a_canary_gives_up_is_stopped_and_nobody_gets_it():
    before = admit(fleet(engine("a"), engine("b")), POLICY, BEFORE, 10.0)
    failed = engine("a", gave_up={(1, 42, "d42"): "other weights"})
    wave = admit(fleet(failed, engine("b")), POLICY, before, 20.0)
    assert (wave.phase, wave.candidate, wave.approved, wave.admitted) == ("stopped", None, GOOD, {})
    assert wave.stopped == (StoppedVersion(1, 42, "d42", "1 engine gave it up: other weights"),)
    later = admit(fleet(failed, engine("b")), POLICY, wave, 30.0)
    assert (later.stopped, later.admitted) == (wave.stopped, {})


def test_with_wrong_2_a_second_canary_is_asked_once_the_first_cannot_read_of_its_slot_any_more():
    policy = replace(POLICY, wrong=2)
    before = admit(fleet(engine("a"), engine("b")), policy, BEFORE, 10.0)
    failed = fleet(engine("a", gave_up={(1, 42, "d42"): "?"}), engine("b"))
    wave = admit(failed, policy, before, 20.0)
    assert (wave.phase, admitted(wave)) == ("canary", {})
    wave = admit(failed, policy, wave, 20.0 + SETTLE)
    assert (wave.phase, admitted(wave)) == ("canary", {"b": NEW.pair})


def test_an_engine_that_gives_up_what_canaries_have_shown_to_be_good_stops_nothing():
    faulty = engine("b", gave_up={(1, 42, "d42"): "its own fault"})
    wave = admit(fleet(engine("a", NEW), faulty, engine("c")), POLICY, BEFORE, 10.0)
    assert (wave.stopped, wave.approved, admitted(wave)) == ((), NEW, {"c": NEW.pair})


def test_one_faulty_engine_does_not_stop_what_is_approved_while_its_canary_does_not_serve():
    approved = replace(BEFORE, candidate=NEW, approved=NEW)
    engines = engine("a", None), engine("b", gave_up={(1, 42, "d42"): "its own fault"}), engine("c")
    wave = admit(fleet(*engines), POLICY, approved, 10.0)
    assert (wave.stopped, wave.approved) == ((), NEW)


def test_a_canary_that_gave_a_version_up_and_ended_stops_it():
    before = admit(fleet(engine("a"), engine("b")), POLICY, BEFORE, 10.0)
    dead = engine("a", None, gave_up={(1, 42, "d42"): "the engine is dead"})
    wave = admit(replace(fleet(engine("b")), ended=(dead,)), POLICY, before, 20.0)
    assert (wave.phase, wave.stopped[0].pair, admitted(wave)) == ("stopped", NEW.pair, {})


@pytest.mark.parametrize("how", ["dies", "starts again"])
def test_two_engines_that_end_while_they_test_a_version_stop_it_and_one_does_not(how):
    """A crash in a load takes the follower with it where the engine is in its process."""
    names = ("a", "b", "c")
    before = admit(fleet(*(engine(name, incarnation="1") for name in names)), POLICY, BEFORE, 10.0)
    assert admitted(before) == {"a": NEW.pair}

    def without(*lost):
        engines = [engine(name, incarnation="1") for name in names if name not in lost]
        died = [engine(name, paused_for=NEW.pair, incarnation="1") for name in lost]
        if how == "dies":
            return replace(fleet(*engines), ended=tuple(died))
        return fleet(*engines, *(engine(name, None, incarnation="2") for name in lost))

    wave = admit(without("a"), POLICY, before, 20.0)
    assert (wave.phase, wave.lost, wave.stopped) == ("canary", ("a",), ())
    wave = admit(without("a"), POLICY, wave, 20.0 + SETTLE)
    assert admitted(wave)["b"] == NEW.pair
    wave = admit(without("a", "b"), POLICY, wave, 50.0)
    assert (wave.phase, wave.candidate) == ("stopped", None)
    assert wave.stopped[0].reason == "2 engines gave it up or ended while loading it"


def test_a_follower_that_starts_again_beside_an_engine_that_serves_is_not_lost():
    before = admit(fleet(engine("a", incarnation="1"), engine("b")), POLICY, BEFORE, 10.0)
    wave = admit(fleet(engine("a", incarnation="2"), engine("b")), POLICY, before, 20.0)
    assert (wave.lost, admitted(wave)) == ((), {"a": NEW.pair})


def test_a_lost_canary_whose_engine_comes_to_run_the_version_counts_no_more():
    before = admit(fleet(engine("a", incarnation="1"), engine("b")), POLICY, BEFORE, 10.0)
    wave = admit(fleet(engine("a", None, incarnation="2"), engine("b")), POLICY, before, 20.0)
    assert wave.lost == ("a",)
    wave = admit(fleet(engine("a", NEW, incarnation="2"), engine("b")), POLICY, wave, 30.0)
    assert (wave.lost, wave.approved) == ((), NEW)


def test_what_an_engine_gave_up_is_tried_again_once_it_is_another_version():
    """An operator goes back to it, or lets it be tested again: the pair is new, the content is not."""
    back = replace(GOOD, generation=2)
    engines = engine("a", NEW), engine("b", NEW), engine("c", NEW, gave_up={(1, 41, "d41"): "out of memory"})
    wave = admit(fleet(*engines, published=back, by_rollback=True), POLICY, BEFORE, 10.0)
    assert (wave.stopped, wave.approved, len(wave.admitted)) == ((), back, 1)
    stopped = replace(BEFORE, stopped=(StoppedVersion(1, 42, "d42", "?"),), candidate=None)
    again = replace(NEW, generation=2)
    engines = engine("a", gave_up={(1, 42, "d42"): "?"}), engine("b", GOOD)
    wave = admit(fleet(*engines, published=again, by_rollback=True), POLICY, stopped, 10.0)
    assert (wave.phase, admitted(wave)) == ("canary", {"b": again.pair})
    old = engine("a", gave_up={(None, 42, "d42"): "its follower does not say of which generation"})
    assert old.has_given_up(again)


@pytest.mark.parametrize("applied", [None, GOOD], ids=["run nothing", "run a version"])
def test_the_wave_of_a_large_fleet_can_be_read(applied):
    engines = [engine(f"host-{number:05}.cluster.example.org-{number}", applied) for number in range(8000)]
    approved = replace(BEFORE, candidate=NEW, approved=NEW)
    wave = admit(fleet(*engines), Policy(max_paused=1.0), approved, 1.7e9)
    assert len(encode_wave(wave)) < SMALL_LIMIT / 2
    assert len(wave.admitted) == (0 if applied is None else MOST_ADMITTED)
    if applied is None:
        assert all(is_admitted(wave, item.name, NEW.pair, None) for item in engines)


def test_canaries_of_a_version_that_others_have_stopped_go_back():
    policy = replace(POLICY, canaries=2)
    wave = replace(BEFORE, candidate=NEW)
    now = admit(fleet(engine("a", NEW), engine("b", gave_up={(1, 42, "d42"): "?"})), policy, wave, 10.0)
    assert (now.phase, admitted(now)) == ("stopped", {"a": GOOD.pair})


def test_a_rollback_skips_canaries_unless_they_have_stopped_the_version_before():
    back = replace(OLD, generation=2)
    engines = (engine("a", NEW), engine("b", NEW), engine("c", NEW))
    readable = {"published": back, "by_rollback": True}
    wave = admit(fleet(*engines, **readable), replace(POLICY, rollback_paused=2), BEFORE, 10.0)
    assert (wave.phase, wave.approved, wave.limit, len(wave.admitted)) == ("rolling", back, 2, 2)
    stopped = replace(BEFORE, stopped=(StoppedVersion(1, 40, "d40", "?"),))
    wave = admit(fleet(*engines, **readable), POLICY, stopped, 10.0)
    assert (wave.phase, len(wave.admitted)) == ("canary", 1)


def test_an_engine_that_runs_nothing_needs_no_slot_and_its_admission_ends_once_it_serves():
    policy = replace(POLICY, canaries=2)
    wave = admit(fleet(engine("a"), engine("new", None)), policy, BEFORE, 10.0)
    assert {name: slot.free for name, slot in wave.admitted.items()} == {"a": False, "new": True}
    assert is_admitted(wave, "new", NEW.pair, None)
    assert not is_admitted(wave, "new", NEW.pair, GOOD.pair)
    later = admit(fleet(engine("a", paused_for=NEW.pair), engine("new")), policy, wave, 11.0)
    assert admitted(later) == {"a": NEW.pair}


def test_a_load_that_hangs_holds_up_nobody_for_longer_than_patience():
    wave = admit(fleet(engine("a", NEW), engine("b"), engine("c")), POLICY, BEFORE, 10.0)
    hanging = fleet(engine("a", NEW), engine("b", paused_for=NEW.pair), engine("c"))
    assert admit(hanging, POLICY, wave, 60.0).waiting == ("c",)
    assert admitted(admit(hanging, POLICY, wave, 71.0)) == {"b": NEW.pair, "c": NEW.pair}


def test_a_withdrawn_admission_keeps_its_slot_for_a_while():
    wave = admit(fleet(engine("a"), engine("b")), POLICY, BEFORE, 10.0)
    back = replace(OLD, generation=2)
    changed = fleet(engine("a"), engine("b"), published=back, by_rollback=True)
    now = admit(changed, POLICY, wave, 11.0)
    assert (admitted(now), set(now.leaving)) == ({"a": back.pair}, {"a"})
    now = admit(fleet(engine("a"), engine("b"), published=back, by_rollback=True), POLICY, now, 12.0 + SETTLE)
    assert now.leaving == {}


def test_a_withdrawn_admission_of_an_engine_that_runs_nothing_keeps_no_slot():
    wave = admit(fleet(engine("a", NEW), engine("new", None), engine("other", None)), POLICY, BEFORE, 10.0)
    back = replace(OLD, generation=2)
    engines = engine("a", NEW), engine("new", GOOD), engine("other", GOOD)
    now = admit(fleet(*engines, published=back, by_rollback=True), POLICY, wave, 11.0)
    assert (admitted(now), now.leaving, now.waiting) == ({"new": back.pair}, {}, ("other", "a"))


def test_while_more_units_are_taken_than_may_be_none_of_them_gets_a_further_slot():
    held = replace(BEFORE, leaving={"a": 9.0, "b": 9.0})
    engines = engine("a"), engine("b"), engine("c", NEW)
    assert admitted(admit(fleet(*engines), POLICY, held, 10.0)) == {}
    assert admitted(admit(fleet(*engines), POLICY, held, 9.0 + SETTLE)) == {"a": NEW.pair}


def test_the_slot_of_a_dead_follower_is_kept_for_a_while_since_it_may_return():
    wave = admit(fleet(engine("a", NEW), engine("b"), engine("c")), POLICY, BEFORE, 10.0)
    now = admit(fleet(engine("a", NEW), engine("c")), POLICY, wave, 70.0)
    assert (admitted(now), now.leaving, now.waiting) == ({}, {"b": 70.0}, ("c",))
    returned = fleet(engine("a", NEW), engine("b", paused_for=NEW.pair), engine("c"))
    assert admit(returned, POLICY, now, 72.0).waiting == ("c",)
    assert admitted(admit(fleet(engine("a", NEW), engine("c")), POLICY, now, 70.0 + SETTLE)) == {
        "c": NEW.pair
    }


def test_a_version_is_approved_also_if_a_newer_one_is_published_when_its_test_ends():
    newer = replace(NEW, step=43, digest="d43")
    wave = admit(fleet(engine("a"), engine("b")), POLICY, BEFORE, 10.0)
    later = replace(fleet(engine("a", NEW), engine("b"), published=newer), readable=READABLE | {(43, "d43")})
    now = admit(later, POLICY, wave, 20.0)
    assert (now.candidate, now.approved, admitted(now)) == (newer, NEW, {"a": newer.pair})
    assert now.waiting == ("b",)


def test_engines_of_a_host_pause_together_if_it_is_the_unit():
    engines = [
        replace(engine(name, NEW if name == "a" else GOOD), unit=f"host {name in 'abc'}") for name in "abcd"
    ]
    assert set(admit(fleet(*engines), POLICY, BEFORE, 10.0).admitted) == {"b", "c"}


def test_one_that_does_not_wait_is_named_and_counts_while_it_loads():
    old = engine("old", waits=False, paused_for=NEW.pair)
    wave = admit(fleet(engine("a", NEW), engine("b"), old), POLICY, BEFORE, 10.0)
    assert (wave.old, wave.waiting, admitted(wave)) == (("old",), ("b",), {"old": NEW.pair})


def test_a_wave_is_taken_over_with_its_slots():
    wave = admit(fleet(engine("a", NEW), engine("b"), engine("c")), POLICY, BEFORE, 10.0)
    taken = inherited(wave, 5000.0)
    assert (admitted(taken), taken.admitted["b"].since) == (admitted(wave), 5000.0)
    assert admit(fleet(engine("a", NEW), engine("b"), engine("c")), POLICY, taken, 5001.0).waiting == ("c",)


ENGINES = st.lists(
    st.tuples(
        st.sampled_from([None, OLD, GOOD, NEW]),
        st.sampled_from([None, None, NEW.pair, GOOD.pair]),
        st.booleans(),
    ),
    max_size=8,
)


@given(ENGINES, st.integers(1, 3), st.integers(0, 2))
def test_no_more_units_are_admitted_than_may_pause_and_a_wave_settles(states, limit, canaries):
    engines = [
        engine(f"e{place}", applied, paused_for=loading, gave_up={(1, 42, "d42"): "?"} if gave_up else {})
        for place, (applied, loading, gave_up) in enumerate(states)
    ]
    policy = Policy(max_paused=limit, canaries=canaries)
    wave = admit(fleet(*engines), policy, BEFORE, 10.0)
    paused = {item.name for item in engines if item.paused_for}
    new = [name for name, slot in wave.admitted.items() if not slot.free and name not in paused]
    slots = [name for name, slot in wave.admitted.items() if not slot.free]
    assert not new or len(slots) <= limit
    assert not any(wave.admitted[name].pair in wave.stopped_pairs for name in new)
    settled = admit(fleet(*engines), policy, wave, 10.5)
    assert admit(fleet(*engines), policy, settled, 11.0) == settled


# --- followers ------------------------------------------------------------------------------------------------------

WAVE = Wave(candidate=NEW, approved=GOOD, admitted={"a": Admission(1, 42, "d42")})


def test_a_follower_goes_to_what_it_is_admitted_to_then_to_what_is_approved_then_fetches_the_candidate():
    assert target(WAVE, "a", NEW.pair, GOOD.pair) == NEW.pair
    assert target(WAVE, "b", NEW.pair, OLD.pair) == GOOD.pair
    assert target(WAVE, "b", NEW.pair, GOOD.pair) == NEW.pair
    assert not is_admitted(WAVE, "b", NEW.pair, GOOD.pair)
    assert target(WAVE, "b", NEW.pair, None) == GOOD.pair
    assert is_admitted(WAVE, "b", GOOD.pair, None)


def test_nobody_goes_to_a_stopped_version_and_who_runs_it_goes_back():
    stopped = replace(WAVE, candidate=None, stopped=(StoppedVersion(1, 42, "d42"),))
    assert target(stopped, "a", NEW.pair, GOOD.pair) == GOOD.pair
    assert target(stopped, "a", NEW.pair, NEW.pair) == GOOD.pair
    assert not is_admitted(stopped, "a", NEW.pair, GOOD.pair)


def test_without_a_leader_they_go_in_the_order_of_names_and_never_to_a_candidate():
    wave = Wave(candidate=NEW, approved=GOOD, limit=2)
    others = [Other(name, name, OLD.pair) for name in "abcd"]
    assert [goes_alone(wave, name, GOOD.pair, others) for name in "abcd"] == [True, True, False, False]
    others[3] = replace(others[3], is_loading=True)
    assert [goes_alone(wave, name, GOOD.pair, others) for name in "abc"] == [True, False, False]
    assert not goes_alone(wave, "a", NEW.pair, others)


def test_without_a_leader_a_host_does_not_pause_since_an_engine_of_it_that_ran_nothing_loads():
    wave = Wave(approved=GOOD, limit=1, unit="host")
    others = [
        Other("a", "host 0", None, is_loading=True),
        Other("b", "host 0", OLD.pair),
        Other("c", "host 1", OLD.pair, is_loading=True),
    ]
    assert not goes_alone(wave, "b", GOOD.pair, others)
    others[2] = replace(others[2], applied=GOOD.pair, is_loading=False)
    assert goes_alone(wave, "b", GOOD.pair, others)


# --- document, table, retention -------------------------------------------------------------------------------------


def test_the_document_keeps_everything():
    wave = replace(
        WAVE, term=3, beat=7, phase="canary", leaving={"b": 5.0}, waiting=("c",), why="w", old=("o",)
    )
    wave = replace(wave, stopped=(StoppedVersion(1, 2, "d", "r"),), unit="host", by_word=True)
    read = wave_from(decode(encode_wave(wave), "rolling.json"))
    assert (read, read.beat) == (wave, 7)


@pytest.mark.parametrize(("key", "value"), [("phase", "none"), ("admitted", []), ("candidate", {"step": 1})])
def test_a_document_with_a_wrong_field_is_damaged(key, value):
    document = decode(encode_wave(WAVE), "rolling.json")
    document.document[key] = value
    with pytest.raises(CorruptDataError):
        wave_from(document)


@click.command()
@daemon_options
def watch(**overrides):
    """Print what `syncd watch` is configured by in the working directory."""
    config = read_config(Job.at("."), overrides)
    click.echo(f"{config.keep_last} {config.parts.get('rolling')}")


def configured(directory, monkeypatch, *options):
    monkeypatch.chdir(directory)
    return CliRunner().invoke(watch, options, catch_exceptions=False).output.strip()


def test_the_table_and_the_options_make_the_same_policy(tmp_path, monkeypatch):
    options = ["--rolling-max-paused", "25%", "--rolling-canaries", "2", "--rolling-unit", "host"]
    policy = Policy(0.25, 2, unit="host")
    assert configured(tmp_path, monkeypatch, "--keep-last", "3", *options) == f"3 {policy}"
    table = {"max_paused": "25%", "canaries": 2, "unit": "host"}
    assert load(None, {"rolling": table}).parts["rolling"] == policy
    assert load(None, {}).parts == {}
    assert [Policy(0.25).limit(count, goes_back=False) for count in (1, 6, 8)] == [1, 1, 2]


def test_options_replace_keys_of_the_table_in_the_file(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("[daemon.rolling]\ncanaries = 2\nwrong = 3\n")
    assert configured(tmp_path, monkeypatch, "--rolling-canaries", "4") == f"2 {Policy(canaries=4, wrong=3)}"


def test_a_file_has_the_keys_in_their_table_alone(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[daemon]\nrolling_canaries = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'rolling_canaries'"):
        load(str(path), {})
    problems = [*daemon_problems({"daemon": {"rolling_canaries": 1}})]
    assert [problem.key for problem in problems] == ["daemon.rolling_canaries"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"max_paused": 0}, "max_paused = 0 is not a number of units"),
        ({"max_paused": "101%"}, "is not a number of units"),
        ({"canary": 1}, "unknown key 'canary' in [daemon.rolling]"),
        ({"unit": "rack"}, "unit = 'rack' is not one of engine, host"),
        ({"patience": 0}, "patience = 0 is not a number above 0"),
        ({"wrong": 0}, "wrong = 0 is not an integer of at least 1"),
        (3, "[daemon.rolling] is not a table"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(table, text):
    with pytest.raises(ConfigError) as caught:
        load(None, {"rolling": table})
    assert text in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("method", ["nccl", "auto"])
def test_it_is_refused_with_a_method_that_may_broadcast(tmp_path, method):
    path = tmp_path / "config.toml"
    path.write_text(f'[sync]\nmethod = "{method}"\n[daemon.rolling]\ncanaries = 1\n')
    with pytest.raises(ConfigError, match="no effect on a broadcast") as caught:
        load(str(path), {})
    assert caught.value.exit_code == 78
    with pytest.raises(ConfigError, match="no effect on a broadcast"):
        load(None, {"rolling": {}}, document={"sync": {"method": method}})


def test_retention_keeps_what_engines_are_told_to_load():
    steps = {
        step: Step(step, f"global_step_{step}", "syncd", StepState.COMPLETE, digest=f"d{step}")
        for step in range(30, 43)
    }
    version = Version(1, 42, "weights", "global_step_42/actor", "d42")
    wave = replace(
        WAVE, approved=replace(GOOD, step=33, digest="d33"), admitted={"a": Admission(1, 35, "d35")}
    )
    rules = {
        decision.step: decision.rule
        for decision in decide(Snapshot(steps=steps, version=version, wave=wave), DaemonConfig())
        if decision.keep
    }
    assert (rules[33], rules[35]) == ("rolled_out", "rolled_out")
    assert 34 not in rules
