"""A host that is lost takes its journal along: its open groups are counted by the number in the job's record."""

import json
import shutil
from contextlib import ExitStack, closing, contextmanager

import pytest
from structlog.testing import capture_logs
from support.jobs import ManualClock

from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.run_record import EVERY, GatewayRun, PlayedTasks
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


@contextmanager
def opened(job, directory, clock=None):
    """Open the run of gateway e0 as a process does until it serves; yields the run and what it resumed."""
    with ExitStack() as ended:
        writer = ended.enter_context(ExperienceWriter(job, "e0"))
        journal = ended.enter_context(closing(TurnJournal(str(directory))))
        run = GatewayRun(writer, journal, PlayedTasks(), clock or ManualClock().monotonic)
        sessions = run.resumed()
        journal.start(sessions.needs, sessions.rest)
        run.confirm(sessions)
        yield run, sessions


def recorded(job):
    with open(f"{job.root}/explorers/e0/gateway.json") as file:
        return json.load(file)


def test_groups_of_a_lost_journal_are_counted_once_however_often_the_gateway_is_killed(job, tmp_path):
    clock = ManualClock()
    with opened(job, tmp_path / "state", clock.monotonic) as (run, _):
        assert recorded(job)["groups"] == 0
        run.note(3)
        assert recorded(job)["groups"] == 0, "not so often"
        clock.sleep(EVERY)
        run.note(3)
        run.note(2, now=True)
        assert (recorded(job)["run"], recorded(job)["groups"]) == (run.name, 2)
    shutil.rmtree(tmp_path / "state")
    with ExperienceWriter(job, "e0") as writer, closing(TurnJournal(str(tmp_path / "state"))) as journal:
        GatewayRun(writer, journal, PlayedTasks()).resumed()
        assert recorded(job)["run"] == run.name, "killed before its journal had the count"
    with capture_logs() as logs, opened(job, tmp_path / "state") as (later, sessions):
        assert sessions.dropped == {"host": 2}
        assert recorded(job)["run"] == later.name
    (lost,) = [line for line in logs if line["event"] == "journal_lost"]
    assert (lost["run"], lost["groups"]) == (run.name, 2)
    with capture_logs() as logs, opened(job, tmp_path / "state") as (_, sessions):
        assert sessions.dropped == {"host": 2}, "no batch has told of them yet"
        sessions.apply({"kind": "written", "groups": [], "reported": True})
        assert sessions.dropped == {}
    assert not [line for line in logs if line["event"] == "journal_lost"]


def test_a_storage_that_refuses_the_number_does_not_end_the_gateway(job, tmp_path, monkeypatch):
    with opened(job, tmp_path / "state") as (run, _):
        with monkeypatch.context() as broken:
            broken.setattr(
                type(job.disk), "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
            )
            run.note(1, now=True)
        assert recorded(job)["groups"] == 0
        run.note(1, now=True)
        assert recorded(job)["groups"] == 1


def test_a_record_without_a_number_loses_an_unknown_number(job, tmp_path):
    with opened(job, tmp_path / "state"):
        pass
    path = f"{job.root}/explorers/e0/gateway.json"
    document = recorded(job)
    del document["groups"]
    with open(path, "w") as file:
        json.dump(document, file)
    shutil.rmtree(tmp_path / "state")
    with capture_logs() as logs, opened(job, tmp_path / "state") as (_, sessions):
        assert sessions.dropped == {}
    assert [line["groups"] for line in logs if line["event"] == "journal_lost"] == [0]
