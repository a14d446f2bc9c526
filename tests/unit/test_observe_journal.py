"""The journal: whole lines, rotation, and a disk that refuses."""

import errno
import json
import os

import pytest

from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.observe.journal import MAX_LINE, Journal, encode_event, first_event_at, read_events


def event(name: str = event_names.STEP_COMPLETED, at: float = 1.0, **fields) -> Event:
    return Event(name, "info", at, fields)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "events.jsonl")


@pytest.fixture
def journal(path):
    """Return a journal that leads."""
    leading = Journal(path)
    leading.observe(event(event_names.LEADERSHIP_ACQUIRED, term=1))
    return leading


def steps(path, limit=100):
    return [item["step"] for item in read_events(path, limit) if "step" in item]


def test_each_event_is_one_journal_line(path, journal):
    journal.observe(event(at=12.25, step=7, rule="leased", hint=None))
    with open(path) as file:
        lines = file.read().splitlines()
    assert json.loads(lines[1]) == {
        "at": 12.25,
        "event": "step_completed",
        "level": "info",
        "step": 7,
        "rule": "leased",
    }


def test_event_fields_cannot_overwrite_name_level_or_time():
    line = json.loads(encode_event(event(at=5.0, event="x", level="y")))
    assert (line["event"], line["level"], line["at"]) == ("step_completed", "info", 5.0)


def test_values_without_a_json_form_become_text():
    assert "object at" in json.loads(encode_event(event(step=object())))["step"]


def test_an_oversized_event_is_shortened():
    line = encode_event(event(detail="x" * (2 * MAX_LINE)))
    assert len(line) < 200
    assert json.loads(line)["shortened"] is True


def test_a_standby_writes_its_events_only_once_it_leads(path):
    journal = Journal(path)
    journal.observe(event(event_names.DAEMON_STARTED))
    journal.observe(event(event_names.STANDBY_STARTED))
    assert not os.path.exists(path)
    journal.observe(event(event_names.LEADERSHIP_ACQUIRED, term=2))
    assert [item["event"] for item in read_events(path, 9)] == [
        "daemon_started",
        "standby_started",
        "leadership_acquired",
    ]


def test_a_fenced_daemon_stops_writing_its_journal(path, journal):
    journal.observe(event(event_names.LEADERSHIP_LOST))
    journal.observe(event(step=1))
    assert [item["event"] for item in read_events(path, 9)] == ["leadership_acquired"]


def test_the_number_of_events_a_standby_keeps_is_limited(path):
    journal = Journal(path)
    for step in range(1000):
        journal.observe(event(step=step))
    journal.observe(event(event_names.LEADERSHIP_ACQUIRED))
    assert len(read_events(path, 1000)) == 64


def test_scans_and_lag_changes_are_not_journaled(path, journal):
    journal.observe(event(event_names.SCAN_COMPLETED))
    journal.observe(event(event_names.EXPLORER_LAG_CHANGED))
    assert len(read_events(path, 9)) == 1


def test_rotation_keeps_three_old_files_without_gaps(path):
    journal = Journal(path, max_bytes=1000)
    journal.observe(event(event_names.LEADERSHIP_ACQUIRED))
    for step in range(200):
        journal.observe(event(step=step))
    assert sorted(os.listdir(os.path.dirname(path))) == [
        f"events.jsonl{end}" for end in ("", ".1", ".2", ".3")
    ]
    assert all(os.path.getsize(f"{path}{end}") <= 1000 for end in ("", ".1", ".2", ".3"))
    kept = steps(path, 1000)
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 30


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EIO])
def test_events_that_cannot_be_written_are_dropped_and_counted(path, journal, monkeypatch, number):
    real = os.open

    def refuse(name, *arguments, **more):
        if str(name) == path:
            raise OSError(number, os.strerror(number), name)
        return real(name, *arguments, **more)

    journal.observe(event(step=1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for step in (2, 3):
            journal.observe(event(step=step))
    assert journal.dropped == 2
    journal.observe(event(step=4))
    told = [item for item in read_events(path, 9) if item["event"] == "operation_failed"]
    assert [(item["code"], item["detail"]) for item in told] == [
        ("journal", "2 events could not be written here")
    ]
    assert steps(path) == [1, 4]


def test_a_partial_line_does_not_damage_the_next_one(path, journal, monkeypatch):
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        journal.observe(event(step=1))
    assert journal.dropped == 1
    journal.observe(event(step=2))
    assert steps(path) == [2]


def test_events_are_dropped_if_the_directory_is_missing(tmp_path):
    journal = Journal(str(tmp_path / "none" / "events.jsonl"))
    journal.observe(event(event_names.LEADERSHIP_ACQUIRED))
    assert journal.dropped == 1


def test_a_symbolic_link_as_journal_is_not_followed(path, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("precious\n")
    os.symlink(target, path)
    journal = Journal(path)
    journal.observe(event(event_names.LEADERSHIP_ACQUIRED))
    assert target.read_text() == "precious\n"


def test_reading_a_journal_skips_bad_lines_and_is_bounded(path):
    with open(path, "wb") as file:
        file.write(b'\n{"event": "a", "n": 1}\nnot json\n[1]\n{"no": "event"}\n' + b"\xff\xfe\n")
        file.writelines(encode_event(event(step=step, detail="x" * 500)) for step in range(1000))
        file.write(b'{"event": "torn", ')
    assert steps(path, 3)[-2:] == [998, 999]
    assert len(read_events(path, 10**6)) == 1001
    assert read_events(f"{path}.none", 5) == []
    assert read_events(path, 0) == []


@pytest.mark.parametrize(
    ("at", "begins"), [("5.5", 5.5), ("1" + "0" * 400, None), ('"x"', None), ("true", None)]
)
def test_the_date_of_the_first_event_is_a_number_or_unknown(path, at, begins):
    with open(path, "w") as file:
        file.write(f'{{"at":{at}}}\n')
    assert first_event_at(path) == begins
