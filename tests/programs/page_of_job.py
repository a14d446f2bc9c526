"""Takes screenshots of the page of a real job, at two pixels for each of the page, cropped to its parts.

    PYTHONPATH=.:tests python tests/programs/page_of_job.py JOB OUT

writes OUT/page-top.png (what is published, problems, explorers) and OUT/page-lanes.png (versions by explorer, and the
first charts). Needs playwright, pillow and a Chromium.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from support.browser import started_browser

WIDTH, SCALE, COLORS = 1180, 2, 128
HEIGHTS = {"top": 760, "lanes": 820}


@contextmanager
def served(job: str) -> Iterator[str]:
    """Serve a job's page, and yield its address."""
    command = [sys.executable, "-P", "-m", "syncd", "serve", job, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.terminate()


def part_tops(page: Any) -> dict[str, float]:
    """Return where each part of the page begins."""
    lanes = page.get_by_role("heading", name="Versions by explorer").first
    return {"top": 0.0, "lanes": lanes.bounding_box()["y"] - 16}


def shoot(browser: Any, url: str, out: Path) -> None:
    """Write a picture of each part."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("main:not([hidden]) svg")
    page.wait_for_timeout(3000)  # charts and lanes come by requests of their own
    for name, top in part_tops(page).items():
        path = out / f"page-{name}.png"
        clip = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHTS[name]}
        page.screenshot(path=path, full_page=True, clip=clip)
        Image.open(path).quantize(COLORS).save(path, optimize=True)
    context.close()


def main(job: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    with started_browser() as browser, served(job) as url:
        shoot(browser, url, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
