"""`make test-matrices` runs each file that leaves rows of its matrix out of `make test`."""

import re

from support import matrices
from support.paths import ROOT

USES = re.compile(r"^from support(?:\.matrices)? import .*\b(?:LONG|matrices)\b", re.MULTILINE)


def test_the_target_runs_each_file_with_rows_that_are_left_out():
    listed = (ROOT / "Makefile").read_text().partition("\nMATRICES := ")[2].partition("\n## ")[0]
    using = {path for path in (ROOT / "tests").rglob("test_*.py") if USES.search(path.read_text())}
    elsewhere = {ROOT / "tests/unit/test_matrices.py", ROOT / "tests/integration/test_nfs.py"}  # test-faults
    assert {ROOT / name for name in re.findall(r"\S+\.py", listed)} == using - elsewhere


def test_rows_that_are_not_kept_have_the_mark():
    kept, pair, single = matrices.rows([1, (2, 3), 4], 1)
    assert kept == 1
    assert (pair.values, single.values) == ((2, 3), (4,))
    assert pair.marks == single.marks == (matrices.LONG.mark,) or matrices.LONG in pair.marks
