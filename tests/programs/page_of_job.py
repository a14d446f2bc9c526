"""Takes screenshots of the page of a real job, at two pixels for each of the page, cropped to its parts.

    PYTHONPATH=.:tests python tests/programs/page_of_job.py JOB OUT

writes OUT/page-top.png (what is published, problems, explorers) and OUT/page-lanes.png (versions by explorer, and the
first charts). Needs playwright, pillow and a Chromium.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from support.browser import started_browser

WIDTH, SCALE, COLORS = 1180, 2, 128
LANES = 800
"""Height of the picture that begins with the lanes."""

WATCHED = 63.0
"""Seconds that the page watches heartbeats first: after 60 it knows who is dead."""


@contextmanager
def served(job: str) -> Iterator[str]:
    """Serve a job's page, and yield its address."""
    command = [sys.executable, "-P", "-m", "syncd", "serve", job, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.terminate()


def parts(page: Any) -> dict[str, tuple[int, int]]:
    """Return where each part of the page begins and ends."""
    steps, lanes = (
        round(page.get_by_role("heading", name=name).first.bounding_box()["y"]) - 14
        for name in ("Steps, and why each", "Versions by explorer")
    )
    return {"top": (0, steps), "lanes": (lanes, lanes + LANES)}


def shoot(browser: Any, url: str, out: Path) -> None:
    """Write a picture of each part."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("main:not([hidden]) svg")
    page.wait_for_timeout(WATCHED * 1000)
    page.evaluate("document.body.replaceWith(document.body.cloneNode(true))")  # it moves while it is live
    places, whole = parts(page), Image.open(BytesIO(page.screenshot(full_page=True)))
    for name, (top, end) in places.items():
        part = whole.crop((0, top * SCALE, WIDTH * SCALE, end * SCALE))
        part.convert("RGB").quantize(COLORS).save(out / f"page-{name}.png", optimize=True)
    context.close()


def main(job: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    with started_browser() as browser, served(job) as url:
        shoot(browser, url, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
