"""Every fault of other systems in tests/RECORD.md is named by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r'mark\.fault\(\s*(?:"([^"]+)"|\'([^\']+)\')')


def faults() -> set[str]:
    section = (
        (ROOT / "tests" / "RECORD.md")
        .read_text()
        .split("\n## Faults of other systems\n")[1]
        .split("\n## ")[0]
    )
    rows = section.splitlines()
    return {row.split("|")[1].strip() for row in rows if row.startswith("| ")} - {"fault"}


def test_every_fault_has_a_test_that_names_it():
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= {double or single for double, single in NAMED.findall(path.read_text())}
    assert faults() - found == set()
    assert len(faults()) >= 18


def test_tests_name_only_faults_from_the_table():
    for path in (ROOT / "tests").rglob("test_*.py"):
        for double, single in NAMED.findall(path.read_text()):
            assert (double or single) in faults(), f"{path.name}: {double or single}"
