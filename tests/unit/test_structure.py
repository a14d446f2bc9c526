"""The script that measures the source tree counts what it says, and the product keeps what the figures promise."""

import sys
from pathlib import Path

import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import structure

FILES = {
    "house/__init__.py": '"""A package."""\n',
    "house/roof/__init__.py": "",
    "house/roof/tiles.py": (
        '"""Tiles,\n\nin two lines."""\n\nfrom house.wall.bricks import Brick\n\n# a comment\n\n'
        'class Tile(Brick):\n    """One."""\n\n    count = (\n        1,\n\n        2,\n    )\n'
    ),
    "house/wall/__init__.py": "",
    "house/wall/bricks.py": "class Brick:\n    pass\n\n\nclass Tile:\n    pass\n",
    "house/wall/mortar.py": "import house.roof.tiles\n\nTEXT = '''not\n\na docstring'''\n",
}


@pytest.fixture
def sources(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.read(tmp_path, ["house"])


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings(sources):
    found = {source.path: source.code for source in sources.values()}
    assert found == {
        "house/__init__.py": 0,
        "house/roof/__init__.py": 0,
        "house/roof/tiles.py": 6,
        "house/wall/__init__.py": 0,
        "house/wall/bricks.py": 4,
        "house/wall/mortar.py": 4,
    }


def test_structure_finds_circles_shared_names_and_single_importers(sources):
    figures = structure.measure(sources)
    assert figures["product files"] == 6
    assert figures["code lines"] == 14
    assert figures["circles between folders"] == ["house.roof <-> house.wall"]
    assert figures["class names used more than once"] == {
        "Tile": ["house/roof/tiles.py", "house/wall/bricks.py"]
    }
    assert figures["modules with one importer under 70 lines"] == {
        "house/roof/tiles.py": "house.wall.mortar",
        "house/wall/bricks.py": "house.roof.tiles",
    }


@pytest.mark.slow
def test_the_product_has_no_circle_no_shared_class_name_and_all_files_of_later_features():
    sources = structure.read(Path(ROOT), structure.PACKAGES)
    figures = structure.measure(sources)
    assert figures["circles between folders"] == []
    assert figures["class names used more than once"] == {}
    paths = [source.path for source in sources.values()]
    starts = [start for starts in structure.LATER.values() for start in starts]
    assert [start for start in starts if not any(path.startswith(start) for path in paths)] == []
