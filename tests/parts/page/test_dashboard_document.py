"""What the page is given is what `status` and `ls` say, and no larger than a page can show."""

import json
import os
import re
from pathlib import Path

import pytest
from support.documents import checked
from support.jobs import ManualClock, explorer, start, write_step

from syncd.config import DaemonConfig
from syncd.errors import ConfigError, JobMissingError
from syncd.observe import event_names
from syncd.parts.page import document
from syncd.parts.page.document import PageReader
from syncd.parts.page.poller import PollResult
from syncd.parts.page.site import as_json
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.layout import Job
from syncd.protocol.process import Process
from syncd.protocol.takeover import Candidate
from syncd.views import documents
from syncd.views.job_view import JobViewer


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def sight(job, clock):
    return PageReader(lambda: job, lambda _: DaemonConfig(), clock)


def test_the_document_equals_the_output_of_status_and_ls(job, clock, sight):
    for step in (1, 2, 3):
        write_step(job, step)
        start(job, clock)[0].tick()
    explorer(job, clock, "e0", applied=(1, 2))
    found, look = sight(), JobViewer(job, clock).read()
    status = documents.status(look)
    for of in (found["status"], status):
        of["disk"].pop("free")  # others write to this disk, too
    assert found["status"] == status
    assert [row["step"] for row in found["ls"]["steps"]] == [3, 2, 1], "newest first"
    assert found["left_out"] == {"steps": 0, "explorers": 0, "trainers": 0, "problems": 0}


def test_retention_rules_are_counted_over_all_steps(job, clock, sight):
    for step in (1, 2, 3, 4):
        write_step(job, step)
    start(job, clock, prune=False)[0].tick()
    rules = {row["rule"]: row for row in sight()["rules"]}
    assert {name: row["steps"] for name, row in rules.items()} == {
        "newest_version": 1,
        "keep_last": 1,
        "superseded": 2,
    }
    assert [row["keep"] for row in sight()["rules"]] == [True, True, False]
    assert rules["superseded"]["bytes"] == sum(
        row["bytes"] for row in sight()["ls"]["steps"] if not row["keep"]
    )


def test_long_lists_are_cut_and_counted_and_keep_the_worst_rows(job, clock, sight, monkeypatch):
    monkeypatch.setattr(document, "MOST_ROWS", 3)
    for number in range(1, 6):
        write_step(job, number)
    for number in range(5):
        explorer(job, clock, f"e{number}", applied=(1, 5 - number))
    start(job, clock, prune=False)[0].tick()
    found = sight()
    assert [row["step"] for row in found["ls"]["steps"]] == [5, 4, 3]
    assert [row["id"] for row in found["status"]["explorers"]] == ["e2", "e3", "e4"]
    assert found["left_out"] == {"steps": 2, "explorers": 2, "trainers": 0, "problems": 0}
    assert sum(row["steps"] for row in found["rules"]) == 5


def journal(job, *lines):
    os.makedirs(job.state, exist_ok=True)
    with open(job.events, "w") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def event(name, at, **fields):
    return {"event": name, "at": at, "level": "info", **fields}


def test_events_are_newest_first_without_routine_ones(job, sight):
    journal(
        job,
        event("step_pruned", 1.0, step=1, rule="superseded"),
        event("step_progressed", 2.0, step=2),
        event("trash_emptied", 3.0, entries=1),
        {**event("step_kept", 4.0, step=2, rule="leased"), "level": "debug"},
        event("step_kept", 5.0, step=2, rule="leased"),
        event("no_event_of_ours", 6.0),
        '"no object"',
        "torn {",
    )
    assert [(told["event"], told["at"]) for told in sight()["events"]] == [
        ("step_kept", 5.0),
        ("step_pruned", 1.0),
    ]


def published(step, at):
    return event("version_published", at, generation=1, step=step, reason="newer")


def test_versions_in_a_row_are_one_entry_with_the_removals_between_them(job, sight):
    journal(
        job,
        {**published(1, 1.0), "reason": "first"},
        published(2, 2.0),
        event("step_pruned", 2.5, step=1, rule="superseded"),
        published(3, 3.0),
        published(4, 4.0),
        event("explorer_joined", 5.0, explorer="e0"),
        published(5, 6.0),
        *(event("explorer_died", at, explorer=f"e{at}") for at in (7.0, 8.0, 9.0)),
    )
    died, newest, joined, run, first = sight()["events"]
    assert (died["event"], died["at"]) == ("explorer_died", 9.0)
    assert died["run"] == {"since": 7.0, "count": 3, "removed": 0}
    assert (newest["step"], joined["event"], first["step"]) == (5, "explorer_joined", 1)
    assert (run["at"], run["step"]) == (4.0, 4)
    assert run["run"] == {"since": 2.0, "count": 3, "removed": 1, "first": "1.2"}


@pytest.mark.parametrize(("rotated", "ran"), [(0, 40.0), (2, 140.0), (3, None)])
def test_a_finished_job_ran_from_the_first_event_to_the_last_version(job, clock, sight, rotated, ran):
    write_step(job, 1)
    start(job, clock)[0].tick()
    mark_finished(job, JobEnd(1, "all epochs"))
    at = clock.time() - 40
    journal(job, event("daemon_started", at), published(1, clock.time()))
    for number in range(1, rotated + 1):
        with open(f"{job.events}.{number}", "w") as file:
            file.write(json.dumps(event("daemon_started", at - 50 * number)) + "\n")
    assert sight()["ran"] == ran


def test_a_hostile_journal_is_bounded(job, sight):
    lines = [
        event("operation_failed", number, detail="x" * 5000, nested={"a": [1]}, nan=float("nan"))
        for number in range(99)
    ]
    journal(job, *lines)
    events = sight()["events"]
    assert len(events) == document.MOST_EVENTS
    assert len(events[0]["detail"]) < 600
    assert events[0]["nan"] is None
    assert "nested" not in events[0]
    json.loads(as_json(document.answer(PollResult(sight()), 2.0)).body)


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_a_journal_that_is_not_a_regular_file_is_ignored(job, sight, tmp_path_factory, kind):
    os.makedirs(job.state)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "events.jsonl"
    elsewhere.write_text(json.dumps(event("operation_failed", 1.0, code="secret")) + "\n")
    {"fifo": os.mkfifo, "directory": os.mkdir, "link": lambda path: os.symlink(elsewhere, path)}[kind](
        job.events
    )
    assert sight()["events"] == []


def test_before_the_first_poll_the_state_is_starting():
    document_now = document.answer(PollResult(looking_for=3.14159), 2.0)
    assert document_now["status"] is None
    assert document_now["serving"] == {
        "syncd": document_now["serving"]["syncd"],
        "every": 2.0,
        "overview": None,
        "state": "starting",
        "at": None,
        "age": None,
        "looking_for": 3.142,
        "error": None,
    }


def test_an_error_carries_its_code_message_and_hint(job):
    error = JobMissingError("gone", path="/ckpt/job", hint="ls -ld /ckpt/job")
    assert document.answer(PollResult({"status": {}}, 1.0, 2.0, None, error), 2.0)["serving"]["error"] == {
        "code": "job_missing",
        "message": "gone: /ckpt/job",
        "hint": "ls -ld /ckpt/job",
    }


def test_who_counts_as_dead_is_what_the_daemon_is_configured_to_take_for_dead(job, clock):
    explorer(job, clock, "e0")
    Candidate(job, clock, process=Process("another-boot", "pid:[1]", 4242, 1)).claim()
    sight = PageReader(lambda: job, lambda _: DaemonConfig(ttl=300.0, takeover=120.0), clock)
    sight()
    clock.at += 90
    status = sight()["status"]
    assert [status["explorers"][0]["heart"], status["daemon"]["heart"]] == ["unknown", "unknown"]
    clock.at += 220
    status = sight()["status"]
    assert [status["explorers"][0]["heart"], status["daemon"]["heart"]] == ["dead", "dead"]


def test_if_the_policy_becomes_unreadable_the_last_one_applies_with_a_problem(job, clock):
    policies = [DaemonConfig(prune=False)]

    def rules(_):
        if not policies:
            raise ConfigError("not TOML", path="config.toml")
        return policies.pop()

    sight = PageReader(lambda: job, rules, clock)
    assert sight()["status"]["problems"] == [{"name": "daemon", "detail": "no daemon leads this job"}]
    found = sight()
    assert {"name": "config", "detail": "not TOML: config.toml"} in found["status"]["problems"]
    assert found["ls"]["policy"]["prune"] is False


def test_an_invalid_initial_policy_raises(job, clock):
    def rules(_):
        raise ConfigError("not TOML")

    with pytest.raises(ConfigError):
        PageReader(lambda: job, rules, clock)()


def test_free_space_is_read_again_after_a_minute(job, clock):
    class Shrinking(type(job.disk)):
        left = 100

        def free(self, path):
            return self.left

    disk = Shrinking()
    looker = JobViewer(Job(job.root, job.state, disk), clock)
    assert looker.read().snapshot.free == 100
    disk.left = 50
    assert looker.read().snapshot.free == 100
    clock.at += 61
    assert looker.read().snapshot.free == 50


DOCS = Path(__file__).parents[3] / "docs"
STATIC = Path(document.__file__).parent / "static"


def test_the_document_is_as_documented(job, clock, sight):
    write_step(job, 1)
    shown = checked("/data.json", json.loads(as_json(document.answer(PollResult(sight()), 2.0)).body))
    checked("status", {"schema_version": 2, **shown["status"]})
    checked("ls", {"schema_version": 1, **shown["ls"]})
    assert shown["rules"]
    assert set(shown["left_out"]) == {"steps", "explorers", "trainers", "problems"}


def test_the_page_describes_every_retention_rule():
    tables = (DOCS / "retention.md").read_text().split("\n## Rules that protect\n")[1]
    tables = tables.split("\n## How a step is removed\n")[0]
    rules = set(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE))
    words = set(re.findall(r"^  (\w+): \"", (STATIC / "rules.js").read_text(), re.MULTILINE))
    assert words == rules


def test_the_page_describes_only_existing_events():
    words = set(re.findall(r"^  (\w+): \(", (STATIC / "text.js").read_text(), re.MULTILINE))
    assert words
    assert words <= event_names.EVENTS


def test_the_page_describes_every_state_of_an_engine():
    table = (STATIC / "explorers.js").read_text().split("export const ENGINES = {")[1].split("};")[0]
    assert set(re.findall(r"(\w+):", table)) == set(EngineState) - {EngineState.WAITING, EngineState.LOADING}


def test_explorers_whose_engine_is_in_trouble_are_not_cut_off(job, clock, sight, monkeypatch):
    monkeypatch.setattr(document, "MOST_ROWS", 1)
    for name, state in (("a", EngineState.PROVEN), ("b", EngineState.WRONG)):
        explorer(job, clock, name, info=EngineReport(state).document())
    assert [row["id"] for row in sight()["status"]["explorers"]] == ["b"]
