"""Several jobs on one server: each by its name, none in another's way."""

import json
import os
import threading

import pytest
from support.documents import checked
from support.jobs import ManualClock, explorer, start, write_step

from syncd.config import DaemonConfig
from syncd.errors import JobMissingError, StorageError
from syncd.parts.page import jobs
from syncd.parts.page.document import PageReader
from syncd.parts.page.jobs import JobSearch, JobsSite, ServedJob, found_jobs, names_of
from syncd.parts.page.routes import file_routes
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock


def made(path, steps=0):
    os.makedirs(path)
    job = Job.at(path)
    daemon = start(job)[0]
    for step in range(1, steps + 1):
        write_step(job, step)
        daemon.tick()
    daemon.close()
    return job


def serve(job, clock):
    reader = PageReader(lambda: job, lambda _: DaemonConfig(), clock)
    return ServedJob(
        job.root, reader, file_routes(lambda: job, clock, 0.0, with_rollouts=False), clock, 0.0, "../../"
    )


def served(site, path="/jobs.json"):
    return json.loads(site.at(path, {}).body)


def test_the_overview_has_the_documented_fields_and_the_most_urgent_job_first(tmp_path):
    clock = ManualClock()
    finished, running = made(tmp_path / "a", 1), made(tmp_path / "b", 2)
    mark_finished(finished, JobEnd(1, "all epochs"))
    explorer(running, clock, "e0", applied=(1, 1))
    site = JobsSite(lambda: {"a": serve(finished, clock), "b": serve(running, clock)}, clock, 2.0)
    overview = served(site)
    checked("/jobs.json", overview)
    b, a = overview["jobs"]
    assert (b["name"], b["severity"], b["attention"]) == ("b", "critical", "no daemon leads this job")
    assert (b["version"], b["explorers"], b["lag"]) == ({"generation": 1, "step": 2}, 1, 1)
    assert (a["name"], a["severity"], a["finished"]) == ("a", "notice", {"step": 1, "reason": "all epochs"})
    assert served(site, f"/{b['href']}data.json")["status"]["job"] == running.root


def test_a_job_whose_mount_hangs_stops_no_other(tmp_path):
    job, clock, go = made(tmp_path / "good", 1), ManualClock(), threading.Event()
    hanging = ServedJob("/dead", lambda: go.wait() and {}, {}, clock, 0.0)
    site = JobsSite(lambda: {"dead": hanging, "good": serve(job, clock)}, SystemClock(), 2.0)
    jobs_seen = {row["name"]: row for row in served(site)["jobs"]}
    assert jobs_seen["dead"]["severity"] == "unknown"
    clock.at += 60
    rows = served(site)["jobs"]
    assert (rows[0]["name"], rows[0]["state"], rows[0]["severity"]) == ("dead", "stuck", "critical")
    assert "has not returned for 60 s" in rows[0]["attention"]
    assert rows[1]["version"]["step"] == 1
    assert served(site, "/jobs/good/data.json")["serving"]["state"] == "fresh"
    go.set()


def test_a_job_that_cannot_be_read_is_critical_with_the_reason(tmp_path):
    def read():
        raise JobMissingError("the job directory does not exist", path="/gone")

    clock = ManualClock()
    site = JobsSite(lambda: {"gone": ServedJob("/gone", read, {}, clock, 0.0)}, clock, 2.0)
    (row,) = served(site)["jobs"]
    assert (row["severity"], row["state"], row["error"]["code"]) == ("critical", "failing", "job_missing")
    assert row["attention"] == "the job directory does not exist: /gone"


@pytest.mark.parametrize("name", ["job", "a job", "ä%2F<b>", os.fsdecode(b"\xff")])
def test_a_job_is_at_its_quoted_name_and_nowhere_else(tmp_path, name):
    clock = ManualClock()
    job = made(tmp_path / name)
    site = JobsSite(lambda: {name: serve(job, clock)}, clock, 2.0)
    (row,) = served(site)["jobs"]
    assert row["href"].isascii()
    assert site.at(f"/{row['href']}", {}).type.startswith("text/html")
    assert site.at(f"/{row['href']}page.css", {}).type.startswith("text/css")
    for path in ("/jobs/", f"/{row['href'].rstrip('/')}", "/jobs/other/", "/data.json", "/jobs/../jobs.json"):
        assert site.at(path, {}) is None, path


def test_jobs_are_named_by_the_last_part_of_their_paths_if_that_is_enough():
    assert names_of(["/a/x", "/b/x", "/c/y"]) == {"/a/x": "/a/x", "/b/x": "/b/x", "y": "/c/y"}


def test_jobs_are_found_two_levels_deep(tmp_path):
    for path in ("grpo", "first/job", "first/data", "a/b/c", ".hidden"):
        os.makedirs(tmp_path / path)
    for job in ("grpo", "first/job", "a/b/c", ".hidden"):
        (tmp_path / job / "latest_state_dict_iteration.txt").write_text("")
    os.makedirs(tmp_path / "grpo/global_step_1/.syncd")
    assert list(found_jobs(str(tmp_path))) == ["first/job", "grpo"]
    with pytest.raises(StorageError):
        list(found_jobs(str(tmp_path / "none")))


def test_a_link_that_leads_nowhere_hides_no_job(tmp_path):
    made(tmp_path / "grpo", 1)
    os.symlink("loop", tmp_path / "loop")
    assert list(found_jobs(str(tmp_path))) == ["grpo"]


def test_a_search_finds_jobs_that_come_later_and_keeps_the_others(tmp_path, monkeypatch):
    clock = ManualClock()
    made(tmp_path / "b", 1)
    search = JobSearch(str(tmp_path), lambda path: serve(Job.at(path), clock), clock)
    search.poll.current(60.0)
    site = JobsSite(search.jobs, clock, 2.0, search)
    first = search.jobs()["b"]
    made(tmp_path / "a", 1)
    clock.at += jobs.SEARCH_EVERY
    served(site)
    search.poll.current(60.0)
    assert [row["name"] for row in served(site)["jobs"]] == ["a", "b"]
    assert search.jobs()["b"] is first
    assert served(site)["serving"]["root"]["path"] == str(tmp_path)
    monkeypatch.setattr(jobs, "MOST_JOBS", 1)
    assert served(site)["serving"]["left_out"] == 1
