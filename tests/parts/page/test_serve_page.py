"""The page of `syncd serve` in a real browser: what people see, on a phone and on a desk, by day and by night."""

import json
import os
import re
import signal
import subprocess

import pytest
from support.browser import CONTRAST, Pages
from support.cli import command, environment
from support.jobs import explorer, write_step
from support.pages import TIMEOUT, served

from syncd.config import DaemonConfig
from syncd.parts.page.document import PageReader
from syncd.parts.page.jobs import JobsSite, ServedJob
from syncd.parts.page.routes import file_routes
from syncd.parts.page.server import PageServer, serve_in_background
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, Publisher
from syncd.protocol.writer import StepWriter

PHONE, NARROW, DESK = (390, 844), (320, 568), (1280, 800)
HOSTILE = "<img src=x onerror=alert(1)>\u202e\n<script>alert(2)</script>"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job, clock = Job.at(tmp_path_factory.mktemp("jobs") / "qwen-grpo"), SystemClock()
    os.mkdir(job.root)
    for step in (1, 2, 3):
        write_step(job, step, full=step == 1)
        follow(job)
    writer = StepWriter(job, 4, 4, "a")
    writer.begin()
    for rank in (1, 2, 3):
        writer.receipt(rank, [writer.write(f"actor/model-0000{rank}-of-00004.safetensors", b"x" * 10)])
    trainer = Publisher(job.disk, clock, job.trainers, Presence("t0", incarnation="i", host="gpu00", pid=7))
    trainer.prepare()
    trainer.update(step=4)
    explorer(job, clock, "vllm-0", applied=(1, 3))
    explorer(job, clock, "vllm-1", applied=(1, 1), loading=(1, 3), leases=(3,), host=HOSTILE, pid=1)
    return job


def follow(job):
    done = subprocess.run(
        command("watch", job.root, "--once", "--log-level", "error"),
        env=environment(),
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0


@pytest.fixture(scope="module")
def server(job):
    with served(job.root, "--every", "0.5") as page:
        yield page


@pytest.fixture
def show(browser, server):
    """Return what opens the page; in the end nothing may have gone wrong in it."""
    pages = Pages(browser)

    def opened(size=DESK, scheme="light", url=server.url, answer=None):
        return pages.open(url, size, scheme, **({} if answer is None else {"data": answer}))

    yield opened
    pages.close()


def test_the_page_shows_version_progress_and_explorers(show):
    page = show()
    page.wait_for_selector("#link.ok")
    assert page.inner_text("#job") == "qwen-grpo"
    tiles = page.inner_text("#tiles")
    for text in (
        "1.3",
        "published",
        "step 4",
        "1 step ahead of the version",
        "at most 2 steps behind",
        "free on",
    ):
        assert text in tiles, text
    assert "3 of 4" in page.inner_text("#filling")
    assert page.locator("#filling progress").get_attribute("value") == "0.75"
    assert "loading 1.3" in page.inner_text("#explorers")
    assert page.locator("#explorers tbody tr").count() == 2
    steps = page.inner_text("#steps")
    for rule in ("being_written", "newest_version", "previous_version", "full_checkpoint"):
        assert rule in steps, rule
    assert "1.3 published" in page.inner_text("#events")
    assert page.title() == "1.3 \u00b7 qwen-grpo"


def test_the_page_shows_a_new_version_without_a_reload(show, tmp_path):
    job = Job.at(tmp_path / "news")
    os.mkdir(job.root)
    with served(job.root, "--every", "0.5") as server:
        page = show(url=server.url)
        page.wait_for_selector("#tiles :text('none yet')")
        page.evaluate("document.getElementById('job').kept = true")
        write_step(job, 8)
        follow(job)
        page.wait_for_selector("#tiles :text-is('1.8')")
        assert page.evaluate("document.getElementById('job').kept"), "the page was not loaded again"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, NARROW, DESK])
def test_the_page_fits_and_has_contrast_on_every_screen(show, size, scheme):
    page = show(size, scheme)
    page.wait_for_selector("#tiles .tile")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "nothing sticks out"
    assert page.evaluate(CONTRAST) == []
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, shade.removeprefix("rgb(").rstrip(")").split(","))) < 380) is (scheme == "dark")
    assert page.locator("#explorers thead").is_visible() is (size == DESK)


def test_the_contrast_check_finds_poor_contrast(show):
    page = show()
    page.wait_for_selector("#tiles .tile")
    page.evaluate("document.getElementById('job').style.color = 'rgb(200, 200, 200)'")
    assert [text for text, _ in page.evaluate(CONTRAST)] == ["qwen-grpo"]


def test_names_from_the_job_are_shown_as_text(show):
    page = show()
    page.wait_for_selector("#explorers tbody tr")
    assert "<img src=x onerror=alert(1)>\ufffd\ufffd<script>" in page.inner_text("#explorers")
    assert page.locator("main img, main script, main a:not(.help), main style").count() == 0


def test_the_page_recovers_when_the_server_is_back(show, job):
    with served(job.root, "--every", "0.5") as server:
        page = show(url=server.url)
        page.wait_for_selector("#link.ok")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(TIMEOUT)
        page.wait_for_selector("#notices :text('No answer from the server since')")
        assert "The page shows the state of" in page.inner_text("#notices")
        assert page.inner_text("#link") == "no answer"
        assert page.title().startswith("\u26a0")
        assert page.locator("#tiles .tile").count() == 5, "what was known is still there"
        again = [*command("serve", job.root), "--port", str(server.address[1])]
        with subprocess.Popen(again, stdout=subprocess.PIPE, env=environment(), text=True) as heir:
            try:
                page.wait_for_selector("#link.ok")
                assert "No answer" not in page.inner_text("#notices")
            finally:
                heir.terminate()
                heir.communicate(timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("changes", "said", "link"),
    [
        ({"state": "stuck", "looking_for": 130.0, "age": 135.0}, "has not returned for 2 min 1", "stuck"),
        (
            {"state": "failing", "error": {"code": "io", "message": "EIO: <b>", "hint": "findmnt"}},
            "EIO: <b>",
            "failing",
        ),
        ({"state": "fresh", "age": 60.0}, "The data is old. The page shows the state of", "live"),
    ],
)
def test_the_page_reports_old_or_failed_data(show, server, changes, said, link):
    document = server.get().document
    page = show(answer={**document, "serving": {**document["serving"], **changes}})
    page.wait_for_selector(f"#notices :text({json.dumps(said)})")
    assert page.inner_text("#link") == link
    assert page.locator("#tiles .tile").count() == 5


def test_the_page_says_that_the_first_poll_is_running(show, server):
    document = server.get().document
    serving = {**document["serving"], "state": "starting", "age": None, "at": None, "looking_for": 4.0}
    page = show(
        answer={**document, "serving": serving, "status": None, "ls": None, "events": [], "rules": []}
    )
    page.wait_for_selector("#notices :text('The first scan of the job has taken 4 s')")
    assert page.locator("#main").is_hidden()


def test_the_page_asks_for_a_reload_if_the_schema_is_newer(show, server):
    page = show(answer={**server.get().document, "schema_version": 3})
    page.wait_for_selector("#notices :text('reload the page')")
    assert page.locator("#main").is_hidden()


def test_the_page_shows_the_state_of_each_engine_with_its_last_proof(show, server):
    document = server.get().document
    proof = {
        "version": "1.2",
        "mean": 0.00012,
        "worst": 0.1,
        "tolerance": 0.005,
        "calibrated": None,
        "seen": 0.3,
    }
    engine = {
        "state": "proven",
        "since": document["status"]["at"] - 90,
        "ready": True,
        "reason": "",
        "loads": 2,
        "failures": 1,
        "load_seconds": 1.25,
        "proof": proof,
        "given_up": [],
        "exam": "passed",
    }
    row = {**document["status"]["explorers"][0], "heart": "alive", "alive": True, "lag": 0}
    wrong = {**engine, "state": "wrong", "ready": False, "proof": None, "load_seconds": None, "failures": 0}
    rows = [{**row, "id": "good", "engine": engine}, {**row, "id": "bad", "engine": wrong}]
    page = show(PHONE, answer={**document, "status": {**document["status"], "explorers": rows}})
    page.wait_for_selector("#explorers .heart.bad")
    text = page.inner_text("#explorers")
    assert re.search(r"proven 1 min 3\d s", text)
    assert "loaded in 1.25 s \u00b7 1 failed load \u00b7 difference 0.00012 of 0.0050" in text
    assert "changes of 30 % of the model or more would be seen \u00b7 exam passed" in text
    assert re.search(r"wrong 1 min 3\d s", text)
    assert "1 engine not ready" in page.inner_text("#tiles")


def test_the_page_says_why_a_step_will_be_removed(show, server):
    document = server.get().document
    steps = [
        {**row, "keep": False, "rule": "superseded", "detail": "older than the newest 2"}
        for row in document["ls"]["steps"]
    ]
    page = show(PHONE, answer={**document, "ls": {**document["ls"], "steps": steps}})
    page.wait_for_selector("#steps .chip.goes")
    assert "newer steps are kept \u00b7 older than the newest 2" in page.inner_text("#steps")


def test_long_lists_are_folded_with_the_worst_rows_visible(show, server):
    document = server.get().document
    row = {**document["status"]["explorers"][0], "heart": "alive", "alive": True, "lag": 0}
    rows = [{**row, "id": f"e{number:02d}", "lag": number} for number in range(40)]
    rows.append({**row, "id": "gone", "heart": "dead", "alive": False})
    page = show(PHONE, answer={**document, "status": {**document["status"], "explorers": rows}})
    page.wait_for_selector("#explorers button")
    shown = page.locator("#explorers tbody tr:visible")
    assert shown.count() == 12
    assert [shown.nth(number).locator(".first strong").inner_text() for number in range(3)] == [
        "gone",
        "e39",
        "e38",
    ]
    page.click("#explorers button")
    assert shown.count() == 41
    page.wait_for_timeout(1200)
    assert shown.count() == 41, "and it stays so when news come"
    page.click("#explorers button")
    assert shown.count() == 12


def group(name, severity, *details, hint=""):
    text = details[0] if len(details) == 1 else f"{len(details)} {name}"
    return {
        "name": name,
        "severity": severity,
        "count": len(details),
        "text": text,
        "details": list(details),
        "hint": hint,
    }


def test_each_kind_of_problem_is_one_line_and_stays_unfolded_when_news_come(show, server):
    document = server.get().document
    dead = [f"e{number}" for number in range(9)]
    groups = [
        group("daemon", "critical", "no daemon leads this job", hint="syncd watch /ckpt/job"),
        group("dead_explorer", "warning", *dead),
    ]
    page = show(PHONE, answer={**document, "status": {**document["status"], "problem_groups": groups}})
    page.wait_for_selector("#problems .notice")
    assert page.locator("#problems > .notice").count() == 2
    first = page.locator("#problems > .notice").first
    assert first.inner_text().split("\n")[0] == "critical no daemon leads this job"
    assert first.locator("code").inner_text() == "syncd watch /ckpt/job"
    assert first.locator("button").inner_text() == "copy"
    assert not page.locator("#problems li").first.is_visible()
    page.click("#problems summary")
    assert page.locator("#problems li:visible").count() == 9
    groups[1] = group("dead_explorer", "warning", *dead, "e9")
    page.wait_for_selector("#problems :text('10 dead_explorer')")
    assert page.locator("#problems li:visible").count() == 10
    assert page.evaluate(CONTRAST) == []


def test_a_finished_job_has_no_red_and_says_how_long_it_ran(show, server):
    document = server.get().document
    status = {
        **document["status"],
        "finished": {"step": 3, "reason": "total_steps 3 reached"},
        "problem_groups": [group("daemon", "notice", "no daemon leads this job")],
        "daemon": {**document["status"]["daemon"], "heart": "left"},
        "trainers": [{**document["status"]["trainers"][0], "heart": "left", "alive": False}],
        "explorers": [{**row, "heart": "dead", "alive": False} for row in document["status"]["explorers"]],
    }
    page = show(answer={**document, "status": status, "ran": 7500.0})
    page.wait_for_selector("#progress .notice.ok")
    text = page.inner_text("#progress")
    assert "finished at step 3: total_steps 3 reached" in text
    assert "The last version is 1.3, published" in text
    assert "2 h 5 min after the daemon's first event" in text
    assert page.locator(".tile.bad, .notice.bad, .notice.wait").count() == 0


def test_an_empty_job_says_which_command_comes_next(show, tmp_path):
    job = Job.at(tmp_path / "new job")
    os.mkdir(job.root)
    with served(job.root) as server:
        page = show(url=server.url)
        page.wait_for_selector("#progress .notice")
        assert page.locator("#progress code").inner_text() == f"syncd watch '{job.root}'"
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#progress button")
        page.wait_for_selector("#progress button:text('copied')")
        assert page.evaluate("navigator.clipboard.readText()") == f"syncd watch '{job.root}'"
        assert page.locator(".notice.bad").count() == 0


@pytest.mark.parametrize("size", [PHONE, DESK])
def test_the_overview_leads_to_each_job_and_back(show, job, tmp_path, size):
    for name in ("new", "with <b>mark-up-and-more"):
        os.makedirs(tmp_path / name / ".syncd")
    os.symlink(job.root, tmp_path / "grpo")
    with served("--root", tmp_path, "--every", "0.5") as server:
        page = show(size, "dark", url=server.url)
        page.wait_for_selector("main tbody tr:nth-child(3)")
        rows = page.locator("main tbody tr")
        assert [rows.nth(place).locator("a").inner_text() for place in range(3)] == [
            "grpo",
            "new",
            "with <b>mark-up-and-more",
        ]
        first = rows.first.inner_text()
        for text in ("critical", "1.3", "step 4", "at most 2 steps behind", "no daemon leads this job"):
            assert text in first, text
        assert "empty" in rows.nth(1).inner_text()
        assert page.title() == "\u26a0 1 of 3 jobs \u00b7 syncd"
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "nothing sticks out"
        assert page.evaluate(CONTRAST) == []
        link = page.locator("text=with <b>mark-up-and-more")
        assert size == PHONE or link.evaluate("one => one.getBoundingClientRect().height") < 30, (
            "no name is broken"
        )
        link.click()
        page.wait_for_selector("#progress code")
        assert page.inner_text("#job") == "with <b>mark-up-and-more"
        page.click("#up")
        page.click("text=grpo")
        page.wait_for_selector("#tiles :text-is('1.3')")


def test_the_overview_keeps_its_rows_while_only_time_passes(show, job, tmp_path):
    os.symlink(job.root, tmp_path / "grpo")
    with served("--root", tmp_path, "--every", "0.5") as server:
        page = show(url=server.url)
        link = page.wait_for_selector("main tbody a")
        link.focus()
        for _ in range(3):  # what the last but one brought is shown by then
            with page.expect_response("**/jobs.json"):
                pass
        assert link.evaluate("one => document.activeElement === one"), "whoever uses a keyboard stays there"


def test_a_job_that_is_served_no_longer_is_called_gone(show, job):
    clock = SystemClock()
    reader = PageReader(lambda: job, lambda _: DaemonConfig(), clock)
    routes = file_routes(lambda: job, clock, 0.5, with_rollouts=False)
    jobs = {"grpo": ServedJob(job.root, reader, routes, clock, 0.5, "../../")}
    server = PageServer("127.0.0.1", 0, JobsSite(lambda: jobs, clock, 0.5))
    stop = serve_in_background(server)
    try:
        page = show(url=f"http://127.0.0.1:{server.server_port}/jobs/grpo/")
        page.wait_for_selector("#link.ok")
        served_job = jobs.pop("grpo")
        page.wait_for_selector("#notices :text('The server has not had this job since')")
        assert page.inner_text("#link") == "gone"
        assert page.locator("#tiles .tile").count() == 5, "what was known is still there"
        jobs["grpo"] = served_job
        page.wait_for_selector("#link.ok")
    finally:
        stop()
