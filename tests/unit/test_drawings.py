"""The drawings of the documentation are those that their script makes, and each is on a page."""

import json
import re
import sys

from support.doc_pages import PAGES
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import drawings


def test_the_drawings_are_up_to_date():
    made = drawings.drawings()
    assert {name: (drawings.DOCS / name).read_text() for name in made} == made, f"run {drawings.COMMAND}"


def test_every_drawing_and_picture_is_on_a_page():
    shown = {name for page in PAGES for name in re.findall(r"([\w-]+\.(?:svg|png))\b", page.read_text())}
    pictures = {path.name for kind in ("*.svg", "*.png") for path in drawings.DOCS.glob(kind)}
    assert pictures - shown == set()


def test_the_recording_is_what_was_recorded():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import recording

    frames = json.loads(recording.RECORDED.read_text())
    assert recording.draw(frames) == recording.DRAWN.read_text(), "run benchmarks/recording.py draw"
