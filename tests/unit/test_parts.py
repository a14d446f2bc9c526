"""Parts can be taken out: the core and other parts name none, and each lies in folders of its own name."""

import configparser
import re

import pytest
from support.paths import ROOT, TESTS

PACKAGES = ("syncd", "trainer", "explorer_hooks")
NAMED = re.compile(rf"\b({'|'.join(PACKAGES)})[./]parts[./](\w+)")
PARTS = sorted(
    {
        path.name
        for top in PACKAGES
        for path in (ROOT / top / "parts").iterdir()
        if (path / "__init__.py").exists()
    }
)
TABLE = (ROOT / "docs" / "architecture.md").read_text().split("\n### Parts\n")[-1].split("\n## ")[0]


def named_in(path, but="\0"):
    """Return the parts that a file names, as modules or files, in lines without a text."""
    lines = (line for line in path.read_text().splitlines() if but not in line)
    return {name for _, name in NAMED.findall("\n".join(lines))}


def part_of(path):
    """Return the part that a module belongs to, empty for the core."""
    places = path.relative_to(ROOT).parts
    return places[2] if len(places) > 3 and places[1] == "parts" else ""


def test_neither_the_core_nor_another_part_names_a_part():
    modules = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    assert {str(path): others for path in modules if (others := named_in(path) - {part_of(path)})} == {}


def test_other_tests_ask_whether_a_part_is_there():
    """`make test-without` leaves out the few that need one as a whole."""
    helpers = {"parts", "support", "programs"}
    tests = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in helpers]
    naming = {str(path.relative_to(TESTS)) for path in tests if named_in(path, but="importorskip(")}
    assert naming == {"trainer/test_best_steps.py"}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_tests_registers_itself_and_is_in_the_table_of_the_architecture_page(part):
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    registered = "\n".join(config["options.entry_points"].values())
    assert list((TESTS / "parts" / part).glob("test_*.py"))
    assert re.search(rf"= \w+\.parts\.{part}\b", registered)
    assert re.search(rf"^\| {part} \|", TABLE, re.MULTILINE)
