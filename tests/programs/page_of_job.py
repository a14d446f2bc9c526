"""Takes pictures of the page of a real job, at two pixels for each of the page, cropped to its parts.

    PYTHONPATH=.:tests python tests/programs/page_of_job.py JOB OUT [NAME ...]

NAME is top, lanes, rollouts, jobs or phones, all of them unless given, or dead-daemon; each becomes
OUT/page-NAME.png. `tests/programs/long_job.py` runs a job that is worth a picture. Needs playwright, pillow and a
Chromium.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from support.browser import started_browser

WIDTH, SCALE, COLORS = 1180, 2, 128
PHONE = 390, 844
CHARTS, ROWS = 4, 8
"""How many charts are below the lanes, and how many rollouts below the one that is open."""

PAGES = 40
"""Pages of the list that are looked through for a rollout of several versions."""

WATCHED = 63.0
"""Seconds that the page watches heartbeats first: after 60 it knows who is dead."""

OF_VERSIONS = """() => {
  const good = (row) => row.cells[2].textContent.includes(" to ") && row.cells[1].textContent === "1";
  const row = [...document.querySelectorAll("#rollouts tbody tr")].find(good);
  row?.querySelector("button").click();
  return Boolean(row);
}"""
"""Opens a rollout with a reward whose tokens are of more than one version; whether the list has one."""

WHOLE_EVENTS = """(end) => {
  for (const row of document.querySelectorAll(".events > li"))
    row.hidden = row.getBoundingClientRect().bottom + scrollY > end;
}"""
"""Leaves out the decisions that the end of the picture would cut."""

Box = tuple[int, int]
"""Where a part of the page begins and ends."""


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Serve a page, and yield its address."""
    command = [sys.executable, "-P", "-m", "syncd", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def heading(page: Any, name: str) -> int:
    """Return where a section begins."""
    above = page.get_by_role("heading", name=name, exact=True).first.bounding_box()["y"]
    return round(above + page.evaluate("scrollY")) - 14


def bottom(page: Any, selector: str, count: int, margin: int = 14) -> int:
    """Return where the last one of so many elements ends."""
    box = page.locator(selector).nth(count - 1).bounding_box()
    return round(box["y"] + box["height"] + page.evaluate("scrollY")) + margin


def top(page: Any) -> Box:
    """Return the part with what is published, problems, and explorers."""
    end = heading(page, "Steps, and why each is kept or removed")
    page.evaluate(WHOLE_EVENTS, end)
    return 0, end


def lanes(page: Any) -> Box:
    """Return the part with versions by explorer, and the first charts."""
    return heading(page, "Versions by explorer"), bottom(page, ".charts > figure", CHARTS, margin=8)


def rollouts(page: Any) -> Box:
    """Open a rollout, and return the part with it and the list."""
    page.locator("#rollouts summary").first.click()
    page.wait_for_selector("#rollouts tbody tr")
    for _ in range(PAGES):
        if page.evaluate(OF_VERSIONS):
            break
        first = page.locator("#rollouts .pager").inner_text()
        page.get_by_role("button", name="older").click()
        page.wait_for_function(
            "(text) => document.querySelector('#rollouts .pager').innerText !== text", arg=first
        )
    page.wait_for_selector("#rollouts .tokens .token")
    return heading(page, "Rollouts"), bottom(page, "#rollouts tbody tr", ROWS, margin=0)


PARTS: dict[str, Callable[[Any], Box]] = {
    "top": top,
    "lanes": lanes,
    "rollouts": rollouts,
    "dead-daemon": top,
}


@contextmanager
def opened(browser: Any, url: str, size: tuple[int, int]) -> Iterator[Any]:
    """Open a page that shows something."""
    context = browser.new_context(
        viewport=dict(zip(("width", "height"), size, strict=True)), device_scale_factor=SCALE
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("main:not([hidden]) *")
    yield page
    context.close()


def still(page: Any) -> None:
    """Stop what moves while the page is live."""
    page.evaluate("document.body.replaceWith(document.body.cloneNode(true))")


def save(image: Image.Image, path: Path) -> None:
    image.convert("RGB").quantize(COLORS).save(path, optimize=True)


def whole(page: Any) -> Image.Image:
    return Image.open(BytesIO(page.screenshot(full_page=True)))


def shoot_parts(browser: Any, job: str, out: Path, names: list[str]) -> None:
    """Write a picture of each part of a job's page."""
    with served(job, "--rollouts") as url, opened(browser, url, (WIDTH, 900)) as page:
        page.wait_for_timeout(WATCHED * 1000)
        boxes = {name: PARTS[name](page) for name in names}
        still(page)
        picture = whole(page)
        for name, (begin, end) in boxes.items():
            save(picture.crop((0, begin * SCALE, WIDTH * SCALE, end * SCALE)), out / f"page-{name}.png")


def shoot_jobs(browser: Any, root: str, out: Path) -> None:
    """Write a picture of the overview of all jobs below a directory."""
    with served("--root", root) as url, opened(browser, url, (WIDTH, 400)) as page:
        page.wait_for_timeout(WATCHED * 1000)
        end = bottom(page, "footer", 1)
        save(whole(page).crop((0, 0, WIDTH * SCALE, end * SCALE)), out / "page-jobs.png")


def shoot_phones(browser: Any, jobs: list[str], out: Path) -> None:
    """Write what a phone shows of each job, side by side."""
    pictures = []
    for job in jobs:
        with served(job) as url, opened(browser, url, PHONE) as page:
            page.wait_for_timeout(WATCHED * 1000)
            pictures.append(Image.open(BytesIO(page.screenshot())))
    gap = 20 * SCALE
    width = sum(one.width + gap for one in pictures) + gap
    together = Image.new("RGB", (width, pictures[0].height + 2 * gap), "#c9ced6")
    for at, one in enumerate(pictures):
        together.paste(one, (gap + at * (one.width + gap), gap))
    save(together, out / "page-phones.png")


def others(job: Path) -> list[str]:
    """Return the jobs beside a job: those with a file, and empty ones."""
    beside = sorted(path for path in job.parent.iterdir() if path.is_dir() and path != job)
    return [str(path) for path in beside if (path / "config.toml").exists() or not any(path.iterdir())]


def main(job: str, out: str, *names: str) -> None:
    place, root = Path(out), str(Path(job).parent)
    place.mkdir(parents=True, exist_ok=True)
    wanted = list(names) or ["top", "lanes", "rollouts", "jobs", "phones"]
    with started_browser() as browser:
        if parts := [name for name in wanted if name in PARTS]:
            shoot_parts(browser, job, place, parts)
        if "jobs" in wanted:
            shoot_jobs(browser, root, place)
        if "phones" in wanted:
            shoot_phones(browser, [job, *others(Path(job))], place)


if __name__ == "__main__":
    main(*sys.argv[1:])
