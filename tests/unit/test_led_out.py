"""A disk of a job is led out of it by no link, whatever it is asked for."""

import errno
import os
from pathlib import Path

import pytest

from syncd import lines
from syncd.observe.journal import Journal, read_events
from syncd.protocol.disk import list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.opening import open_append, open_read


@pytest.fixture
def job(tmp_path):
    for name in ("job", "outside/below"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("outside/file", "outside/below/file"):
        (tmp_path / name).write_text("precious")
    os.symlink("../outside", tmp_path / "job/link")
    (tmp_path / "job/own").write_text("own")
    return Job.at(str(tmp_path / "job"))


CALLS = {
    "replace": lambda disk, link: disk.replace(f"{link}/file", b"x"),
    "replace below": lambda disk, link: disk.replace(f"{link}/below/file", b"x"),
    "replace via": lambda disk, link: disk.replace(f"{link}/../own", b"x", via=f"{link}/below"),
    "rename from": lambda disk, link: disk.rename(f"{link}/file", f"{os.path.dirname(link)}/stolen"),
    "rename to": lambda disk, link: disk.rename(f"{os.path.dirname(link)}/own", f"{link}/file"),
    "make_directory": lambda disk, link: disk.make_directory(link),
    "make_directory below": lambda disk, link: disk.make_directory(f"{link}/new/newer"),
    "remove_directory": lambda disk, link: disk.remove_directory(f"{link}/below"),
    "unlink": lambda disk, link: disk.unlink(f"{link}/file"),
    "adopt": lambda disk, link: disk.adopt(f"{link}/file"),
    "list below": lambda disk, link: disk.list(f"{link}/below"),
    "remove_tree": lambda disk, link: remove_tree(disk, f"{link}/below"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_listed_made_changed_or_removed_through_a_link(job, tmp_path, call):
    with pytest.raises(OSError, match="symbolic link") as raised:
        call(job.disk, f"{job.root}/link")
    assert raised.value.errno == errno.ELOOP
    assert raised.value.filename == f"{job.root}/link"
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file"]
    assert (tmp_path / "outside/file").read_text() == "precious"
    assert (tmp_path / "outside/below/file").read_text() == "precious"
    assert sorted(os.listdir(job.root)) == ["link", "own"]


def test_a_link_is_no_directory_to_list(job):
    assert list_if_there(job.disk, f"{job.root}/link") == []


def test_a_link_itself_can_go_and_leaves_what_it_leads_to(job, tmp_path):
    assert remove_tree(job.disk, f"{job.root}/link") == 1
    assert (tmp_path / "outside/file").exists()


def test_links_above_the_job_are_the_user_s_own(tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "way")
    job = Job.at(str(tmp_path / "way/job"), str(tmp_path / "way/state"))
    job.disk.make_directory(f"{job.state}/explorers")
    assert (tmp_path / "real/state/explorers").is_dir()


def test_a_state_directory_inside_the_job_must_be_no_link(job, tmp_path):
    os.symlink("../outside", f"{job.root}/.syncd")
    with pytest.raises(OSError, match="symbolic link"):
        job.disk.make_directory(job.explorers)
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file"]


@pytest.mark.parametrize("kind", ["link", "second name", "fifo", "directory"])
def test_logs_are_appended_to_no_file_but_their_own(tmp_path, kind):
    victim, path = tmp_path / "victim", tmp_path / "events.jsonl"
    victim.write_text('{"event":"old"}\n')
    make = {
        "link": lambda: os.symlink(victim, path),
        "second name": lambda: os.link(victim, path),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()
    with pytest.raises(OSError):  # noqa: PT011 - each kind has an error of its own
        open_append(str(path))
    with pytest.raises(OSError):  # noqa: PT011
        lines.append(str(path), [{"a": 1}])
    assert victim.read_text() == '{"event":"old"}\n'


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_reading_lines_never_waits(tmp_path, make):
    path = str(tmp_path / "events.jsonl")
    make(path)
    with pytest.raises(OSError):  # noqa: PT011 - each kind has an error of its own
        open_read(path)
    assert read_events(path, 5) == []
    assert Journal(path).dropped == 0


def test_a_line_without_an_end_costs_no_memory_and_no_other_line(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LINE_LIMIT", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"long":"' + b"x" * 1000 + b'"}\n{"b":2}\n' + b"y" * 65)
    assert list(lines.read(str(path))) == [{"a": 1}, None, {"b": 2}, None]


def test_the_lines_of_a_file_come_as_they_were_appended(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    lines.append(path, [{"a": 1}])
    lines.append(path, [{"b": 2}])
    assert list(lines.read(path)) == [{"a": 1}, {"b": 2}]
    assert Path(path).read_bytes().count(b"\n") == 2
