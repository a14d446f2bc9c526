"""Status as data and as tables: what is said of the living is what was seen."""

import io
import json
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text
from support.jobs import ManualClock, explorer, write_step

from syncd.cli.options import json_text
from syncd.config import DaemonConfig
from syncd.daemon.retention import decide
from syncd.daemon.scan import Scanner
from syncd.errors import JobMissingError
from syncd.protocol.engine_state import EngineReport, EngineState, GivenUp, Proof
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence, RunningStatus, write_presence
from syncd.protocol.process import Process
from syncd.protocol.rolling import Admission, Wave, encode_wave
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import Version, encode_version
from syncd.protocol.writer import StepWriter
from syncd.views import documents, table
from syncd.views.job_view import Heart, JobViewer
from syncd.views.listing import listing
from syncd.views.narrow_table import FittingTable


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


@pytest.fixture
def clock():
    return ManualClock()


def publish(job, clock, step, generation=1, **more):
    os.makedirs(job.state, exist_ok=True)
    found = Scanner(job, clock).reconcile().steps[step]
    version = Version(
        generation, step, found.kind, found.payload, found.digest, published_at=clock.time(), **more
    )
    job.disk.replace(job.version, encode_version(version))


def shown(renderable, width=160):
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_status_of_an_empty_job_says_nothing_is_published(job, clock):
    document = documents.status(JobViewer(job, clock).read())
    assert document["version"] is None
    assert document["daemon"] is None
    assert document["newest_complete"] is None
    assert document["steps"] == {
        "total": 0,
        "filling": 0,
        "complete": 0,
        "damaged": 0,
        "bytes": 0,
        "pinned": [],
    }
    assert "nothing is published yet" in shown(table.status(document))


def test_viewing_a_missing_job_raises(tmp_path, clock):
    with pytest.raises(JobMissingError):
        JobViewer(Job.at(tmp_path / "none"), clock).read()


def test_viewing_a_job_writes_nothing(job, clock):
    write_step(job, 1)
    before = sorted(os.walk(job.root))
    documents.status(JobViewer(job, clock).read())
    assert sorted(os.walk(job.root)) == before


def test_status_shows_the_published_and_the_filling_step(job, clock):
    write_step(job, 5, world_size=2)
    publish(job, clock, 5, previous=(1, 3))
    writer = StepWriter(job, 6, 4, "a")
    writer.begin()
    for rank in (1, 2, 3):
        writer.receipt(rank, [writer.write(f"actor/model-0000{rank}-of-00004.safetensors", b"x" * 10)])
    clock.at += 90
    document = documents.status(JobViewer(job, clock).read())
    assert document["version"]["path"] == f"{job.root}/global_step_5/actor"
    assert document["version"]["age"] == 90.0
    assert document["version"]["previous"] == {"generation": 1, "step": 3}
    assert [(step["step"], step["present"], step["expected"]) for step in document["filling"]] == [(6, 3, 4)]
    text = shown(table.status(document))
    assert "1.5  published 1 min 30 s ago" in text
    assert "3/4" in text


def test_a_single_reading_leaves_liveness_unknown(job, clock):
    explorer(job, clock, "e0")
    document = documents.status(JobViewer(job, clock).read())
    (module,) = document["explorers"]
    assert (module["heart"], module["alive"], module["beat_age"]) == ("unknown", None, 0.0)
    clock.at += 12
    text = shown(table.status(documents.status(JobViewer(job, clock).read())))
    assert "~ 12 s ago" in text
    assert "one reading cannot tell" in text


def test_a_changing_heartbeat_is_alive_and_a_silent_one_dead(job, clock):
    beating, silent = explorer(job, clock, "beating"), explorer(job, clock, "silent", leases=(3,))
    looker = JobViewer(job, clock)
    looker.read()
    for _ in range(13):
        clock.at += 5
        beating.update()
        look = looker.read()
    assert look.hearts == {"explorer/beating": Heart.ALIVE, "explorer/silent": Heart.DEAD}
    assert look.snapshot.leases == {}
    document = documents.status(look)
    assert [module["alive"] for module in document["explorers"]] == [True, False]
    assert {"name": "dead", "detail": "explorer/silent"} in document["problems"]
    silent.update()
    assert looker.read().hearts["explorer/silent"] is Heart.ALIVE


def test_a_module_that_appears_between_readings_is_alive(job, clock):
    looker = JobViewer(job, clock)
    looker.read()
    clock.at += 1
    explorer(job, clock, "new")
    assert looker.read().hearts == {"explorer/new": Heart.ALIVE}


def test_a_stopped_module_is_shown_as_left(job, clock):
    explorer(job, clock, "gone", status=RunningStatus.STOPPED)
    document = documents.status(JobViewer(job, clock).read())
    assert (document["explorers"][0]["heart"], document["explorers"][0]["alive"]) == ("left", False)
    assert not [item for item in document["problems"] if item["name"] == "dead"]


def test_read_until_known_ends_early_or_at_its_time_limit(job, clock):
    publisher = explorer(job, clock, "e0")
    started = clock.at
    JobViewer(job, clock).read_until_known(6)
    assert clock.at == started + 6

    def sleep(seconds: float) -> None:
        clock.at += seconds
        publisher.update()

    clock.sleep = sleep
    started = clock.at
    assert JobViewer(job, clock).read_until_known(6).hearts == {"explorer/e0": Heart.ALIVE}
    assert clock.at < started + 1


@pytest.mark.parametrize(
    ("process", "heart"),
    [(Process.current(), "alive"), (Process("another-boot", "pid:[1]", 4242, 1), "unknown")],
)
def test_the_state_of_a_daemon_on_this_host_is_known_at_once(job, clock, process, heart):
    Candidate(job, clock, process=process).claim()
    document = documents.status(JobViewer(job, clock).read())
    assert (document["daemon"]["heart"], document["daemon"]["term"]) == (heart, 1)


def test_an_ended_daemon_is_dead_and_a_released_one_has_left(job, clock):
    here = Process.current()
    Candidate(job, clock, process=Process(here.boot, here.namespace, 2**22 + 1, 5)).claim()
    document = documents.status(JobViewer(job, clock).read())
    assert document["daemon"]["heart"] == "dead"
    assert {"name": "daemon", "detail": "no daemon leads this job"} in document["problems"]
    heir = Candidate(job, clock)
    assert heir.holder() is None
    heir.claim().release()
    assert documents.status(JobViewer(job, clock).read())["daemon"]["heart"] == "left"


def test_a_silent_daemon_on_another_host_is_dead(job, clock):
    Candidate(job, clock, process=Process("another-boot", "pid:[1]", 4242, 1)).claim()
    looker = JobViewer(job, clock)
    looker.read()
    clock.at += 16
    look = looker.read()
    assert look.lead is not None
    assert look.lead.heart is Heart.DEAD


def test_damaged_steps_and_presences_are_problems(job, clock):
    write_step(job, 1)
    publish(job, clock, 1)
    os.truncate(f"{job.step(1)}/actor/model-00001-of-00001.safetensors", 3)
    explorer(job, clock, "e0")
    with open(f"{job.explorers}/torn.json", "w") as file:
        file.write("{")
    names = {item["name"] for item in documents.status(JobViewer(job, clock).read())["problems"]}
    assert {"damaged_step", "published_step", "explorer/torn"} <= names


def test_each_step_is_listed_with_the_rule_that_keeps_it(job, clock):
    for step in (1, 2, 3):
        write_step(job, step, full=step == 1)
    publish(job, clock, 3, previous=(1, 2))
    explorer(job, clock, "e0", leases=(2,))
    look = JobViewer(job, clock).read()
    document = listing(look, decide(look.snapshot, DaemonConfig()), DaemonConfig())
    rows = {row["step"]: row for row in document["steps"]}
    assert {step: row["rule"] for step, row in rows.items()} == {
        1: "full_checkpoint",
        2: "leased",
        3: "newest_version",
    }
    assert rows[2]["leases"] == ["e0"]
    assert [rows[step]["published"] for step in (1, 2, 3)] == [None, "previous", "newest"]
    text = shown(table.steps(document))
    assert "full_checkpoint" in text
    assert len(text.splitlines()) == 4


def test_presence_text_cannot_inject_control_characters_or_markup(job, clock):
    explorer(job, clock, "e0", host="[red]\x1b[2Jevil[/nope]", pid=7)
    text = shown(table.status(documents.status(JobViewer(job, clock).read())))
    assert "\x1b" not in text
    assert "[red]\\x1b[2Jevil[/nope]:7" in text


def test_names_in_a_wave_cannot_inject_control_characters(job, clock):
    os.makedirs(job.state)
    wave = Wave(admitted={"\x1b[2Je0": Admission(1, 2, "d")}, waiting=("\x1b[2Je1",))
    job.disk.replace(job.rolling, encode_wave(wave))
    text = shown(table.status(documents.status(JobViewer(job, clock).read())))
    assert "\x1b" not in text
    assert "\\x1b[2Je0" in text
    assert "\\x1b[2Je1" in text


@pytest.mark.parametrize("since", [pytest.param(10**400, id="400 digits"), True, "now", None])
def test_a_trainer_that_waits_since_no_time_is_shown_without_it(job, clock, since):
    waiting = {"for": "experiences", "path": "/j", "since": since}
    write_presence(job.disk, made(job.trainers), Presence("t0", info={"waiting": waiting}))
    assert documents.status(JobViewer(job, clock).read())["trainers"][0]["waiting"] is None


def made(directory):
    os.makedirs(directory)
    return directory


def test_many_explorers_are_cut_with_the_worst_first(job, clock):
    write_step(job, 9)
    publish(job, clock, 9)
    for number in range(20):
        explorer(job, clock, f"e{number:02d}", applied=(1, 9 - number % 5))
    text = shown(table.status(documents.status(JobViewer(job, clock).read()), rows=4))
    assert "and 16 more" in text
    assert "e04" in text
    assert "e00" not in text


def test_json_is_one_line_with_a_schema_version(job, clock):
    text = json_text(documents.status(JobViewer(job, clock).read()))
    assert "\n" not in text
    assert json.loads(text)["schema_version"] == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB"), (1 << 60, "1024.0 PiB")],
)
def test_sizes_are_shown_with_their_unit(count, text):
    assert table.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3700, "1 h 1 min"), (200000, "2 d 7 h")],
)
def test_ages_are_shown_with_their_unit(seconds, text):
    assert table.age(seconds) == text


# --- engines ----------------------------------------------------------------------------------------------------

PROOF = Proof("1.5.abc", 0.0001234, 0.01, 0.005, 0.0002, 60, 0.5)


def engine(job, clock, name, state, **more):
    """Return the published presence of an explorer whose engine is in a state for 90 seconds."""
    report = EngineReport(EngineState(state), **{"since": clock.time() - 90, "ready": True, **more})
    return explorer(job, clock, name, info=report.document())


def test_status_shows_the_state_of_each_engine_and_its_last_proof(job, clock):
    given_up = (GivenUp(6, "xxh", "it does not fit", refused=True),)
    proof = replace(PROOF, seen=0.3)
    more = {"loads": 3, "failures": 2, "load_seconds": 1.25, "proof": proof, "given_up": given_up}
    engine(job, clock, "e0", "proven", **more)
    explorer(job, clock, "older")
    document = documents.status(JobViewer(job, clock).read())
    (shown_engine, older) = (item["engine"] for item in document["explorers"])
    assert (shown_engine["state"], shown_engine["since"], shown_engine["ready"]) == (
        "proven",
        clock.time() - 90,
        True,
    )
    assert (shown_engine["loads"], shown_engine["failures"], shown_engine["load_seconds"]) == (3, 2, 1.25)
    assert (shown_engine["proof"]["mean"], shown_engine["proof"]["tolerance"]) == (0.0001234, 0.005)
    assert shown_engine["given_up"][0]["reason"] == "it does not fit"
    assert older is None
    assert json.loads(json_text(document, documents.STATUS_SCHEMA))["schema_version"] == 2
    text = shown(table.status(document))
    assert text.startswith("job  "), "problems are last"
    assert shown(table.status(document, problems_first=True)).startswith("! ")
    head, row, other = text.split("explorer  ")[1].splitlines()[:3]
    columns = "heartbeat status engine load failures proof applied loading lag leases host"
    assert head.split() == columns.split()
    assert "proven 1 min 30 s" in row
    assert "1.25 s" in row
    assert "0.00012 of 0.005, sees 30%" in row
    assert other.split() == ["older", "~", "0", "s", "ago", "running"]


def test_explorers_that_report_no_engine_are_shown_as_before(job, clock):
    explorer(job, clock, "e0", info={"state": "serving", "engine": "vllm"})
    explorer(job, clock, "e1", info={"state": "proven", "since": "yesterday"})
    document = documents.status(JobViewer(job, clock).read())
    assert [item["engine"] for item in document["explorers"]] == [None, None]
    assert "engine" not in shown(table.status(document))
    assert {item["name"] for item in document["problems"]} == {"daemon"}


@pytest.mark.parametrize("state", ["refused", "failed", "unreachable", "wrong", "dead"])
def test_an_engine_in_trouble_is_a_problem_with_its_reason(job, clock, state):
    engine(job, clock, "a", "proven")
    engine(job, clock, "b", state, reason="it says why", ready=state == "refused")
    document = documents.status(JobViewer(job, clock).read())
    assert {"name": f"engine_{state}", "detail": "b: it says why"} in document["problems"]
    text = shown(table.status(document))
    assert re.search(r"^! warning: .*b: it says why$", text, re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith(("a ", "b "))]
    assert rows[0].startswith("b "), "trouble comes first"
    assert ("not ready" in rows[0]) == (state == "failed")


def test_an_explorer_that_has_stopped_has_a_stopped_engine(job, clock):
    beating = engine(job, clock, "e0", "wrong", reason="stale head")
    beating.update(status=RunningStatus.STOPPED)
    document = documents.status(JobViewer(job, clock).read())
    (item,) = document["explorers"]
    assert (item["engine"]["state"], item["engine"]["ready"], item["engine"]["reason"]) == (
        "stopped",
        False,
        "",
    )
    assert item["engine"]["since"] == clock.time()
    assert {item["name"] for item in document["problems"]} == {"daemon"}


def test_the_engine_of_a_dead_explorer_is_not_ready_and_no_problem_of_its_own(job, clock):
    engine(job, clock, "good", "proven")
    engine(job, clock, "bad", "wrong", reason="stale head")
    looker = JobViewer(job, clock)
    looker.read()
    clock.at += 61
    document = documents.status(looker.read())
    assert [item["engine"]["ready"] for item in document["explorers"]] == [False, False]
    assert {item["name"] for item in document["problems"]} == {"dead", "daemon"}


def test_texts_of_a_hostile_presence_are_bounded(job, clock):
    long = "x" * 5000
    report = EngineReport(EngineState.WRONG, reason="short").document()
    one = {"step": 1, "digest": long, "reason": long, "refused": True}
    explorer(job, clock, "e0", info={**report, "reason": long, "given_up": [one] * 50})
    document = documents.status(JobViewer(job, clock).read())
    assert len(json_text(document)) < 20_000
    assert len(document["explorers"][0]["engine"]["given_up"]) == 8


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_a_narrow_terminal_leaves_columns_out_and_breaks_no_name(job, clock, width):
    names = ["explorers-vllm-117-0", "explorers-vllm-118-10"]
    for step in (1, 2, 120000):
        write_step(job, step)
    publish(job, clock, 120000)
    for name in names:
        engine(job, clock, name, "proven")
    document = documents.status(JobViewer(job, clock).read())
    lines = shown(table.status(document), width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(sum(line.split()[:1] == [name] for line in lines) == 1 for name in names)
    assert any("proven" in line for line in lines)
    assert f"{job.root}/global_step_120000/actor" in "".join(line.strip() for line in lines), "not cut either"
    look = JobViewer(job, clock).read()
    steps = listing(look, decide(look.snapshot, DaemonConfig()), DaemonConfig())
    listed = shown(table.steps(steps), width).splitlines()
    assert max(map(len, listed)) <= width
    rows = [line.split() for line in listed if line.split()[:1] in (["1"], ["2"], ["120000"])]
    assert [row[:2] for row in rows] == [["1", "complete"], ["2", "complete"], ["120000", "complete"]]
    left_out = [line for line in (*lines, *listed) if line.startswith("not shown: ")]
    assert left_out or width > 80


WORDS = st.text("abc é漢 ", max_size=40).map(str.strip)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4), st.integers(24, 130))
def test_texts_are_laid_out_as_rich_does_it(rows, width):
    made = FittingTable("step", "state", "why", drop=(), wraps=("why",))
    made.columns[0].justify = "right"
    for step, state, why in rows:
        made.add_row(step, Text(state, "red").append("!", "bold"), why)
    widths = {str(column.header): made._width(PLAIN, PLAIN.options, column) for column in made.columns}
    no_wrap = made._needed(widths, [*widths]) <= width
    by_rich = shown(made._table(made.columns, no_wrap=no_wrap), width).splitlines()
    assert [line.rstrip() for line in shown(made, width).splitlines()] == [line.rstrip() for line in by_rich]


PLAIN = Console(file=io.StringIO(), width=160)


def test_rich_measures_none_of_the_texts_of_a_listing(job, clock, monkeypatch):
    for step in (1, 2, 3):
        write_step(job, step)
    look = JobViewer(job, clock).read()
    made = table.steps(listing(look, decide(look.snapshot, DaemonConfig()), DaemonConfig()))
    monkeypatch.setattr(Measurement, "get", None)
    assert shown(made).count("complete") == 3
