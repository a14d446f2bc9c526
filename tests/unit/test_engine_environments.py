"""The scripts that install real engines for tests: they run for minutes, so what they name is looked up here."""

import re

import pytest
from support import paths

HERE = paths.ROOT / "tests" / "explorer" / "engines"


@pytest.mark.parametrize("script", sorted(HERE.glob("install_*.sh")), ids=lambda path: path.name)
def test_each_file_that_an_install_script_names_is_there(script):
    names = re.findall(r"\$here/([\w./-]+)", script.read_text())
    assert names
    assert [name for name in names if not (HERE / name).is_file()] == []
