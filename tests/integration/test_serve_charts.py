"""The charts of `syncd serve`: their data over HTTP, and what a real browser makes of them."""

import json
import os
import re

import pytest
from support.browser import CONTRAST, Pages, started_browser
from support.pages import served

from syncd.protocol.layout import Job

PHONE, DESK = (390, 844), (1280, 800)


def line(step, **metrics):
    return {"step": step, "time": f"2026-01-02T03:{step:02d}:00Z", "metrics": metrics}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    job = Job.at(tmp_path_factory.mktemp("jobs") / "curves")
    os.makedirs(job.state)
    rewards = [{"reward/mean": step / 10, "reward/min": 0.0, "reward/max": 1.0} for step in range(10)]
    written = [line(step, **found, **{"actor/pg_loss": 0.5}) for step, found in enumerate(rewards)]
    written[4]["metrics"]["actor/pg_loss"] = 9.0
    written[6]["metrics"]["actor/pg_loss"] = None
    with open(f"{job.root}/metrics.jsonl", "w") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in written)
        file.write("torn\n")
    events = [
        {"event": "explorer_joined", "at": 1767322800.0, "explorer": "e0"},
        {"event": "version_published", "at": 1767322860.0, "step": 1, "latency": 0.025},
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


@pytest.fixture(scope="module")
def browser():
    with started_browser() as started:
        yield started


@pytest.fixture
def pages(browser):
    pages = Pages(browser)
    yield pages
    pages.close()


def test_charts_show_values_with_units_under_mouse_and_keys(pages, server):
    page = pages.open(server.url, DESK)
    page.wait_for_selector("#charts svg .curve")
    reward, loss, _, _, latency, saved, _ = page.locator("#charts figure").all()
    assert "mean 0.9" in reward.inner_text()
    assert "range 0 to 1" in reward.inner_text()
    assert "latest: step 9" in reward.inner_text()
    assert "25 ms" in latency.inner_text()
    assert "No version has changes of a parent." in saved.inner_text()
    assert loss.locator(".odd").count() == 1, "the value that is not finite is marked"
    assert len(re.findall("M", loss.locator(".curve").get_attribute("d"))) == 2, "and breaks the line"
    assert "1 line could not be read" in page.inner_text("#charts")

    drawing = loss.locator("svg")
    drawing.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert re.fullmatch(r"step 4, .*: loss 9", drawing.get_attribute("aria-valuetext"))
    assert "step 4" in reward.inner_text(), "the other charts show the same time"
    assert loss.locator(".cursor").get_attribute("hidden") is None
    page.keyboard.press("Tab")
    assert "latest: step 9" in reward.inner_text()

    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 57, box["y"] + 40)
    assert "step 0" in reward.inner_text()
    assert "mean 0\n" in f"{reward.inner_text()}\n".replace(" range", "\n")


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_charts_fit_and_have_contrast(pages, server, size, scheme):
    page = pages.open(server.url, size, scheme)
    page.wait_for_selector("#charts svg .curve")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate(CONTRAST) == []
    figure, drawing = page.locator("#charts figure").first, page.locator("#charts svg").first
    assert drawing.bounding_box()["width"] <= figure.bounding_box()["width"]


def test_an_old_or_partial_reading_is_called_so(pages, server):
    document = server.get("/charts.json").document
    error = {"code": "io", "message": "EIO: <b>", "hint": None}
    serving = {**document["serving"], "state": "failing", "error": error}
    files = [{"name": "metrics.jsonl", "bytes": 100 << 20, "read": 16 << 20, "ignored": 0}]
    page = pages.open(server.url, PHONE, charts={**document, "serving": serving, "files": files})
    page.wait_for_selector("#charts svg .curve")
    text = page.inner_text("#charts")
    assert re.search(r"The charts are of .*: EIO: <b>\.", text)
    assert "metrics.jsonl: 16 MiB of 100 MiB read so far." in text
