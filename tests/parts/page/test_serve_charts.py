"""Charts and rollouts of `syncd serve`: their data over HTTP, and what a real browser makes of them."""

import json
import os
import re

import pytest
from support.browser import CONTRAST, Pages
from support.experiences import make, segmented, write
from support.pages import served

from syncd.experience.model import Span
from syncd.protocol.layout import Job

PHONE, DESK = (390, 844), (1280, 800)


def line(step, **metrics):
    return {"step": step, "time": f"2026-01-02T03:{step:02d}:00Z", "metrics": metrics}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    job = Job.at(tmp_path_factory.mktemp("jobs") / "curves")
    os.makedirs(job.state)
    edges = {"critic/score/min": 0.0, "critic/score/max": 1.0}
    rewards = [{"critic/score/mean": step / 10} | edges for step in range(10)]
    written = [line(step, **found, **{"actor/pg_loss": 0.5}) for step, found in enumerate(rewards)]
    for number in range(8):
        written[7]["metrics"][f"reward/parts/part \u202e{number}"] = number / 8
    written[4]["metrics"]["actor/pg_loss"] = 9.0
    written[6]["metrics"]["actor/pg_loss"] = None
    with open(f"{job.root}/metrics.jsonl", "w") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in written)
        file.write("torn\n")
    events = [
        {"event": "explorer_joined", "at": 1767322800.0, "explorer": "e0"},
        {"event": "version_published", "at": 1767322860.0, "step": 1, "latency": 0.025},
        {
            "event": "versions_applied",
            "at": 1767322860.0,
            "explorers": [["e0", 1, 1, "proven"], ["e1", 1, 1, "loaded"]],
        },
        {"event": "versions_applied", "at": 1767322890.0, "explorers": [["e0", 1, 2, "proven"]]},
        {"event": "explorer_died", "at": 1767322920.0, "explorer": "e1"},
    ]
    with open(job.events, "w") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in events)
    with served(job.root, "--every", "0.5") as page:
        yield page


def test_charts_are_served_as_json(server):
    found = server.get("/charts.json").document
    assert (found["schema_version"], found["serving"]["state"]) == (1, "fresh")
    charts = {chart["name"]: chart["series"] for chart in found["charts"]}
    assert charts["reward"][0]["points"][9] == [1767323340.0, 9, pytest.approx(0.9)]
    assert charts["latency"][0]["points"] == [[1767322860.0, 1, 0.025]]
    assert charts["saved"][0]["points"] == []
    metrics, _ = found["files"]
    assert (metrics["name"], metrics["ignored"]) == ("metrics.jsonl", 1)
    assert metrics["read"] == metrics["bytes"]


@pytest.fixture
def pages(browser):
    pages = Pages(browser)
    yield pages
    pages.close()


def test_charts_show_values_with_units_under_mouse_and_keys(pages, server):
    page = pages.open(server.url, DESK)
    page.wait_for_selector("#charts svg .curve")
    shown = {figure.locator("h3").inner_text(): figure for figure in page.locator("#charts figure").all()}
    reward, loss, parts = shown["Reward"], shown["Loss"], shown["Parts of the reward"]
    latency, saved = shown["From marker to version"], page.locator("#charts figure[hidden]").last
    assert "mean 0.9" in reward.inner_text()
    assert "range 0 to 1" in reward.inner_text()
    assert "latest: step 9" in reward.inner_text()
    assert "25 ms" in latency.inner_text()
    assert [parts.locator(f".dot.of-{place}").count() for place in range(7)] == [1] * 6 + [0]
    assert "part \ufffd5 0.625" in parts.inner_text()
    assert "Parts of the reward: 2 figures more in metrics.jsonl." in page.inner_text("#charts")
    assert "Evaluation" not in page.inner_text("#charts"), "not every job has evaluations"
    assert saved.count() == 1
    assert "No version has changes of a parent yet: Saved by deltas, in all." in page.inner_text("#charts")
    assert loss.locator(".odd").count() == 1, "the value that is not finite is marked"
    assert len(re.findall("M", loss.locator(".curve").get_attribute("d"))) == 2, "and breaks the line"
    assert "1 line could not be read" in page.inner_text("#charts")

    drawing = loss.locator("svg")
    drawing.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert re.fullmatch(r"step 4, .*: policy 9", drawing.get_attribute("aria-valuetext"))
    assert "step 4" in reward.inner_text(), "the other charts show the same time"
    assert loss.locator(".cursor").get_attribute("hidden") is None
    page.keyboard.press("Tab")
    assert "latest: step 9" in reward.inner_text()

    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 57, box["y"] + 40)
    assert "step 0" in reward.inner_text()
    assert "mean 0\n" in f"{reward.inner_text()}\n".replace(" range", "\n")


def test_lanes_show_which_version_each_explorer_ran_when(pages, server):
    page = pages.open(server.url, PHONE)
    page.wait_for_selector("#lanes svg rect")
    assert page.locator("#lanes .name").all_inner_texts() == ["e0", "e1"]
    first, second = page.locator("#lanes svg[role=slider]").all()
    states = [rect.get_attribute("class").split()[1] for rect in page.locator("#lanes rect").all()]
    assert states == ["proven", "proven", "reported"]
    halves = [rect.bounding_box()["width"] for rect in first.locator("rect").all()]
    assert halves[0] == pytest.approx(halves[1], abs=2), "30 s each, to the newest event"
    first.focus()
    page.keyboard.press("Home")
    assert re.fullmatch(r"e0: 1\.1, proven, .* \(30 s\)", page.inner_text("#lanes .told"))
    assert second.locator(".gone.dead").count() == 1
    assert re.fullmatch(r"1\.1, loaded, .*, then dead \(1 min 0 s\)", second.get_attribute("aria-valuetext"))


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_charts_fit_and_have_contrast(pages, server, size, scheme):
    page = pages.open(server.url, size, scheme)
    page.wait_for_selector("#charts svg .curve")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate(CONTRAST) == []
    figure, drawing = page.locator("#charts figure").first, page.locator("#charts svg").first
    assert drawing.bounding_box()["width"] <= figure.bounding_box()["width"]
    last = drawing.locator("circle").last.bounding_box()
    right = drawing.bounding_box()["x"] + drawing.bounding_box()["width"]
    assert last["x"] + last["width"] <= right, "the newest value is seen"


def test_an_old_or_partial_reading_is_called_so(pages, server):
    document = server.get("/charts.json").document
    error = {"code": "io", "message": "EIO: <b>", "hint": None}
    serving = {**document["serving"], "state": "failing", "error": error}
    files = [{"name": "metrics.jsonl", "bytes": 100 << 20, "read": 16 << 20, "ignored": 0}]
    page = pages.open(server.url, PHONE, charts={**document, "serving": serving, "files": files})
    page.wait_for_selector("#charts svg .curve")
    text = page.inner_text("#charts")
    assert re.search(r"The charts show .*: EIO: <b>\.", text)
    assert "metrics.jsonl: 16 MiB of 100 MiB read so far." in text


# --- rollouts -------------------------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    job = Job.at(tmp_path_factory.mktemp("jobs") / "kept")
    os.makedirs(job.root)
    spans, info = [Span(0, 1, 4), Span(2, 1, 5)], {"why": HOSTILE, "score": {"format": 0.25}}
    batch = [
        make("g0", 0, tag=7, step=4, spans=spans, unproven=[False, True, False], info=info, created_at=9.0)
    ]
    batch += [make("g0", 1, tag=7, reward=1.0), *segmented("g1", 0, steps=[3, 4])]
    _, torn = write(job, "e0", batch, [make()])
    os.truncate(torn, 100)
    with served(job.root, "--every", "0.5", "--rollouts") as page:
        yield page


def test_rollouts_are_served_as_json_only_if_they_are_asked_for(server, kept):
    assert server.get("/rollouts.json").document == {"schema_version": 1, "enabled": False}
    assert server.get("/rollout.json?explorer=e0&batch=1").status == 404
    found = kept.get("/rollouts.json?reward_min=0.9").document
    assert [(row["row"], row["reward"]) for row in found["rollouts"]] == [(1, 1.0)]
    assert (found["found"], found["known"], found["unreadable"][0]["batch"]) == (1, 3, 2)
    assert kept.get("/rollouts.json?version=x").status == 404
    one = kept.get("/rollout.json?explorer=e0&batch=1&row=2&segment=1").document
    assert (one["segment"], one["segments"], one["response"]["versions"]) == (1, 2, [[0, 1, 4]])


def test_a_kept_rollout_shows_its_tokens_with_version_and_log_prob(pages, kept):
    page = pages.open(kept.url, PHONE, "dark")
    page.click("#rollouts summary")
    page.wait_for_selector("#rollouts tbody tr")
    assert page.locator("#rollouts tbody tr").count() == 3
    assert "Batches that cannot be read: 1" in page.inner_text("#rollouts")
    page.fill("#rollouts [name=version]", "1.5")
    page.wait_for_selector("#rollouts :text('1 of 3 rollouts')")
    assert page.locator("#rollouts tbody tr").count() == 1
    page.click("#rollouts tbody button")
    page.wait_for_selector(".rollout .token")
    text = page.inner_text(".rollout")
    assert HOSTILE in text
    assert page.locator(".rollout img").count() == 0
    assert '"format": 0.25' in text
    assert "Shown as ids: config.toml of the job names no model.path" in text
    tokens = page.locator(".rollout .tokens .token")
    assert [tokens.nth(place).get_attribute("class") for place in range(3)] == [
        "token v0",
        "token v0 unproven",
        "token v1",
    ]
    page.focus(".rollout .tokens[tabindex]")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    told = page.inner_text(".rollout .told")
    assert told == "token 2 \u00b7 id 11 \u00b7 version 1.4 (not proven) \u00b7 log-prob -0.200 (81.9 %)"
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.evaluate(CONTRAST) == []
    page.click(".rollout >> text=close")
    assert page.locator(".rollout").count() == 0


def test_the_page_says_how_rollouts_are_shown(pages, server):
    page = pages.open(server.url, DESK)
    page.click("#rollouts summary")
    page.wait_for_selector("#rollouts :text('syncd serve JOB --rollouts')")
