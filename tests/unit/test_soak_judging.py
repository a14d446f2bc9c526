"""A soak that finds nothing proves something only if it would find what is wrong: its judges and its checker."""

import json
import os
import random
import time

import pytest
from soak import report
from soak.flat import is_flat, trend
from soak.judging import Disturbance, excused, leaders, loads_of
from soak.parts import Part
from soak.samples import Samples
from soak.schedule import DAEMONS, ENDING, KINDS, ON_DISK, REST, Terms, schedule
from soak.versions import Versions, why_not_after
from support import checker
from support.processes import must, write_steps

TERMS = Terms(3600.0, 6.0, 20.0, ["e0", "e1", "e2"], ["e0", DAEMONS[0]], 1200.0)


def test_a_seed_determines_the_soak_schedule():
    assert schedule(7, TERMS) == schedule(7, TERMS) != schedule(8, TERMS)


def test_a_schedule_covers_all_faults_and_parts_and_ends_in_time():
    acts = schedule(1, TERMS)
    assert {act.kind for act in acts} == set(KINDS)
    assert {act.who for act in acts} == {"disk", "trainer", *DAEMONS, "e0", "e1", "e2"}
    assert acts == sorted(acts)
    assert max(act.at + act.lasts for act in acts) <= 3600 - 3600 / 10
    assert any(act.lasts > TERMS.ttl for act in acts if act.kind == "stop"), "some are silent for too long"


def test_a_part_rests_between_two_faults():
    free = {}
    for act in schedule(3, TERMS):
        assert act.at >= free.get(act.who, 0.0)
        free[act.who] = act.at + act.lasts + REST


def test_spared_parts_are_ended_only_before_the_sparing_begins():
    ends = [act for act in schedule(1, TERMS) if act.who in TERMS.spared and act.kind in ENDING]
    assert ends
    assert all(act.at < TERMS.spared_from for act in ends)


def test_unsupported_faults_are_left_out_of_the_schedule():
    kinds = set(KINDS) - ON_DISK - {"cut"}
    few = Terms(600.0, 3.0, 20.0, ["e0"], kinds=tuple(kinds))
    assert {act.kind for act in schedule(1, few)} == kinds


def series(grows, noise=0.0, seed=1):
    chance = random.Random(seed)
    return [(float(at), 1000.0 + grows * at + chance.uniform(-noise, noise)) for at in range(0, 3600, 5)]


@pytest.mark.parametrize(
    ("points", "flat"),
    [
        (series(0.0), True),
        (series(0.0, noise=10.0), True),
        (series(0.01, noise=10.0), False),
        ([(at, value + 500 * (at > 3500)) for at, value in series(0.0)], True),
        ([(at, min(at, 900.0)) for at, _ in series(0.0)], True),
        ([(at, 1000.0 - at) for at, _ in series(0.0)], True),
        ([(at, value + at // 60) for at, value in series(0.0)], False),
    ],
    ids=["constant", "noise", "a slow leak in noise", "a peak at the end", "grown into its size", "less", "steps"],
)  # fmt: skip
def test_a_flat_series_is_distinguished_from_a_growing_one(points, flat):
    assert is_flat(trend(points), allowance=8.0) is flat


def test_a_few_points_have_no_trend():
    assert trend([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) is None


def test_a_restarted_process_begins_a_new_series(tmp_path):
    samples = Samples()
    (tmp_path / ".syncd").mkdir()
    for at in range(3):
        samples.take(float(at), str(tmp_path), {"a": os.getpid()})
    samples.take(3.0, str(tmp_path), {"a": os.getppid()})
    assert [at for at, _ in samples.series["a", "rss"]] == [3.0]
    assert samples.highest["a", "threads"] >= 1
    assert [at for at, _ in samples.series["job", "state_files"]] == [0.0, 1.0, 2.0, 3.0]


def test_a_journal_that_is_never_rotated_is_reported():
    assert report.unbounded({("job", "events_longest"): 1 << 20})
    assert not report.unbounded({("job", "events_longest"): 100.0, ("job", "steps"): 5.0})


LOAD = {"event": "failed", "pair": [1, 5], "began": 100.0, "ended": 101.0, "bytes": 10, "reason": "gone"}


@pytest.mark.parametrize(
    ("done", "may"),
    [
        (Disturbance("cut", "e0", 100.5, 102.0), True),
        (Disturbance("cut", "e0", 90.0, 92.0), False),
        (Disturbance("stop", "e0", 70.0, 95.0), True),
        (Disturbance("stop", "e0", 40.0, 70.0), False),
        (Disturbance("stop", "e0", 100.2, 100.8), False),
        (Disturbance("kill", "e0", 100.5, 100.5), False),
    ],
    ids=["cut off in it", "cut off before", "silent until then", "silent long ago", "stopped shortly", "killed"],
)  # fmt: skip
def test_failed_loads_are_excused_only_near_a_fault(done, may):
    assert excused(LOAD, [done], ttl=20.0) is may
    judged = loads_of("e0", [LOAD, LOAD | {"event": "runs"}], [done], 20.0)
    assert (judged.loads, judged.excused, len(judged.wrong)) == (1, int(may), int(not may))


def test_two_concurrent_leaders_or_publishers_are_reported():
    def leads(term):
        return {"event": "leadership_acquired", "term": term}

    def published(step):
        return {"event": "version_published", "generation": 1, "step": step}

    assert leaders({"a": [leads(1), published(1)], "b": [leads(2), published(2)]}) == []
    assert leaders({"a": [leads(1)], "b": [leads(1)]})
    assert leaders({"a": [leads(1), published(3)], "b": [leads(2), published(3)]})


def test_an_unexpected_exit_of_a_part_is_reported(tmp_path):
    part = Part("p", lambda: ["sh", "-c", "exit 3"], str(tmp_path / "log"), dict(os.environ))
    part.start()
    part.process.wait(20)
    part.tend()
    assert part.ends == ["p ended with 3; see its log"]
    part.tend()
    assert part.starts == 1


VERSION = {"generation": 1, "step": 5, "term": 2}


@pytest.mark.parametrize(
    ("after", "allowed"),
    [
        ({"step": 6}, True),
        ({"generation": 2, "step": 3}, True),
        ({"step": 6, "term": 3}, True),
        ({"step": 4}, False),
        ({"term": 3}, False),
        ({"last_good": {"step": 4}}, True),
        ({"last_good": {"step": 4}, "term": 3}, True),
        ({"last_good": {"step": 4}, "term": 1}, False),
        ({"last_good": {"step": 4}, "digest": "another"}, False),
        ({"step": 6, "term": 1}, False),
        ({"generation": 0, "step": 9}, False),
    ],
)
def test_the_order_of_versions_is_judged(after, allowed):
    assert (why_not_after(VERSION, VERSION | after) == []) is allowed
    assert why_not_after(None, VERSION) == []


@pytest.fixture
def job(tmp_path):
    must(write_steps(str(tmp_path), 1, 3))
    (tmp_path / ".syncd").mkdir()
    return str(tmp_path)


def announce(job, step, term=1):
    document = {
        "generation": 1, "step": step, "term": term, "digest": checker.manifest(job, step)["digest"]
    }  # fmt: skip
    with open(f"{job}/.syncd/new", "w", encoding="ascii") as file:
        json.dump(document, file)
    os.replace(f"{job}/.syncd/new", f"{job}/.syncd/version.json")


def seen_by_checker(job, *steps):
    versions = Versions(job)
    versions.start()
    for step in steps:
        announce(job, step)
        ends = time.monotonic() + 60
        while versions.pair != (1, step) and time.monotonic() < ends:
            time.sleep(0.01)
    versions.end(60)
    return versions


def test_complete_versions_in_order_are_accepted(job):
    versions = seen_by_checker(job, 1, 2, 3)
    assert (versions.wrong, versions.seen) == ([], 3)


def test_a_version_that_decreases_is_reported(job):
    assert seen_by_checker(job, 3, 2).wrong == ["the version went from (1, 3) to (1, 2)"]


def test_a_damaged_version_is_reported(job):
    path = f"{job}/global_step_2/actor/model-00001-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (wrong,) = seen_by_checker(job, 1, 2).wrong
    assert "content does not match" in wrong
