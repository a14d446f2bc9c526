"""docs/explorer-run.md ends with all keys of [explorer], those of all parts among them."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")

from syncd.jobfile.model import KEYS

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date():
    page = (ROOT / "docs" / "explorer-run.md").read_text()
    assert page.endswith(f"\n{KEYS.documentation('explorer')}"), (
        "write the output of `explorer config docs` to its end"
    )
