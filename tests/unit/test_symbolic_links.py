"""A disk of a job is led out of it by no link, whatever it is asked for."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from syncd import jsonl
from syncd.errors import StorageError, UsageError
from syncd.observe.journal import Journal, read_events
from syncd.protocol.disk import list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.takeover import Candidate
from syncd.protocol.writer import StepWriter
from syncd.safe_open import open_append, open_read


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
def test_a_job_disk_refuses_every_operation_through_a_symbolic_link(job, tmp_path, call):
    with pytest.raises(OSError, match="symbolic link") as raised:
        call(job.disk, f"{job.root}/link")
    assert raised.value.errno == errno.ELOOP
    assert raised.value.filename == f"{job.root}/link"
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file"]
    assert (tmp_path / "outside/file").read_text() == "precious"
    assert (tmp_path / "outside/below/file").read_text() == "precious"
    assert sorted(os.listdir(job.root)) == ["link", "own"]


def test_listing_a_symbolic_link_gives_no_entries(job):
    assert list_if_there(job.disk, f"{job.root}/link") == []


def test_removing_a_symbolic_link_keeps_its_target(job, tmp_path):
    assert remove_tree(job.disk, f"{job.root}/link") == 1
    assert (tmp_path / "outside/file").exists()


def test_symbolic_links_above_the_job_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "way")
    job = Job.at(str(tmp_path / "way/job"), str(tmp_path / "way/state"))
    job.disk.make_directory(f"{job.state}/explorers")
    assert (tmp_path / "real/state/explorers").is_dir()


def test_a_symbolic_link_as_state_directory_is_refused(job, tmp_path):
    os.symlink("../outside", f"{job.root}/.syncd")
    with pytest.raises(OSError, match="symbolic link"):
        job.disk.make_directory(job.explorers)
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file"]


@pytest.mark.parametrize("kind", ["link", "second name", "fifo", "directory"])
def test_logs_are_not_appended_through_links_or_to_special_files(tmp_path, kind):
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
        jsonl.append(str(path), [{"a": 1}])
    assert victim.read_text() == '{"event":"old"}\n'


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_reading_a_journal_that_is_not_a_file_does_not_block(tmp_path, make):
    path = str(tmp_path / "events.jsonl")
    make(path)
    with pytest.raises(OSError):  # noqa: PT011 - each kind has an error of its own
        open_read(path)
    assert read_events(path, 5) == []
    assert Journal(path).dropped == 0


def test_an_overlong_line_is_skipped_without_losing_others(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_LIMIT", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"long":"' + b"x" * 1000 + b'"}\n{"b":2}\n' + b"y" * 65)
    assert list(jsonl.read(str(path))) == [{"a": 1}, None, {"b": 2}, None]


def test_jsonl_lines_are_read_in_the_order_of_appending(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    jsonl.append(path, [{"a": 1}])
    jsonl.append(path, [{"b": 2}])
    assert list(jsonl.read(path)) == [{"a": 1}, {"b": 2}]
    assert Path(path).read_bytes().count(b"\n") == 2


def test_a_step_is_not_written_through_a_link(job, tmp_path):
    os.mkdir(job.step(2))
    os.symlink("../../outside", f"{job.step(2)}/actor")
    (tmp_path / "outside/stray.safetensors").write_text("precious")
    with pytest.raises(UsageError, match="files that syncd did not write"):
        StepWriter(job, 2, 1, "attempt").begin()
    writer = StepWriter(job, 3, 1, "attempt")
    os.mkdir(writer.path)
    os.symlink("../../outside", f"{writer.path}/actor")
    with pytest.raises(OSError, match="symbolic link"):
        writer.begin()
    with pytest.raises(OSError, match="symbolic link"):
        writer.write("actor/model-00001-of-00001.safetensors", b"x")
    with pytest.raises(OSError, match="symbolic link"):
        writer.add_file("actor/model.safetensors", lambda path: (Path(path).write_bytes(b"x"), "xxh3_128:0"))
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file", "stray.safetensors"]


@pytest.mark.parametrize("name", [".consumed", ".rejected", ".archive", ".writers"])
def test_experiences_are_not_moved_through_symbolic_links(job, tmp_path, name):
    pytest.importorskip("pyarrow")
    from syncd.experience.writer import ExperienceWriter
    from trainer.experience.store import ExperienceReader

    os.makedirs(f"{job.root}/experiences/e0")
    os.symlink("../../outside", f"{job.root}/experiences/{name}")
    for number in (1, 2):
        Path(job.root, f"experiences/e0/{number}.parquet").write_bytes(b"no batch")
    (tmp_path / "outside/e0").mkdir()
    (tmp_path / "outside/e0/1.parquet").write_text("precious")
    (tmp_path / "outside/e0.json").write_text("precious")
    reader = ExperienceReader(job, consumed="archive")
    list(reader.poll())
    reader.commit({"e0": 2}, frozenset())
    with contextlib.suppress(StorageError):
        ExperienceWriter(job, "e0").close()
    there = {path.relative_to(tmp_path / "outside") for path in (tmp_path / "outside").rglob("*")}
    assert {str(path) for path in there} == {"below", "below/file", "file", "e0", "e0/1.parquet", "e0.json"}
    assert (tmp_path / "outside/e0.json").read_text() == "precious"
    assert (tmp_path / "outside/e0/1.parquet").read_text() == "precious"


def test_a_new_leader_does_not_follow_a_symbolic_link_in_the_trash(job, tmp_path):
    os.makedirs(f"{job.trash}/0000000002")
    os.symlink("../../../outside", f"{job.trash}/0000000001")
    Path(f"{job.trash}/0000000003").write_text("no directory")
    os.makedirs(f"{job.lock}/0000000004")
    Candidate(job, SystemClock(), timeout=0).holder()
    candidate = Candidate(job, SystemClock(), timeout=0)
    assert candidate.holder() is None
    term = candidate.claim()
    assert os.listdir(job.trash) == [os.path.basename(os.path.dirname(term.trash))]
    assert sorted(os.listdir(tmp_path / "outside")) == ["below", "file"]
