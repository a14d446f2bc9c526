"""The charts of docs/figures.md are those of the recorded figures, and are legible in light and in dark."""

import re
import sys

import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import charts
import drawing

DRAWN = charts.charts()


@pytest.mark.parametrize("name", DRAWN)
def test_a_chart_is_what_the_recorded_figures_say(name):
    assert (ROOT / "docs" / name).read_text() == DRAWN[name], "run python benchmarks/charts.py"


def test_the_table_of_readers_is_what_the_recorded_figures_say():
    page = (ROOT / "docs" / "figures.md").read_text()
    assert page == charts.with_table(page), "run python benchmarks/charts.py"
    assert page.count(charts.TABLE[0]) == page.count(charts.TABLE[1]) == 1


def test_the_page_of_figures_shows_each_chart_with_a_text_for_those_who_do_not_see_it():
    page = (ROOT / "docs" / "figures.md").read_text()
    shown = dict(re.findall(r"!\[([^\]]+)\]\((chart-[\w-]+\.svg)\)", page))
    assert (
        sorted(shown.values())
        == sorted(DRAWN)
        == sorted(path.name for path in (ROOT / "docs").glob("chart-*.svg"))
    )


@pytest.mark.parametrize("palette", [drawing._LIGHT, drawing._DARK], ids=["light", "dark"])
def test_texts_have_contrast_to_the_card(palette):
    card, _, *texts = map(luminance, palette)
    for color, light in zip(palette[2:], texts, strict=True):
        low, high = sorted((card, light))
        assert (high + 0.05) / (low + 0.05) >= (3.0 if color != palette[2] else 7.0), color


def luminance(color):
    """Return the relative luminance of a color, by WCAG."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
