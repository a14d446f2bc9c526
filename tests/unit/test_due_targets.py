"""Long targets are due when they never ran, failed, or when what they test has changed since."""

import subprocess
import sys

import pytest
import targets
from support.paths import ROOT

MANIFEST = '[test-far]\npaths = ["code", "new"]\n'


@pytest.fixture
def repository(tmp_path):
    """Return the place of the records in a repository with one commit, and what runs git in it."""

    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    place = tmp_path / "tests"
    place.mkdir()
    (place / "targets.toml").write_text(MANIFEST)
    (tmp_path / "code").write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    return place, git


def ran(place, monkeypatch, code, *more):
    monkeypatch.setattr(targets, "PLACE", place)
    ends = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert targets.main(["run", "test-far", *more, "--", *ends]) == code


def test_a_target_is_due_until_it_passes_and_when_what_it_tests_has_changed(repository, monkeypatch):
    place, git = repository
    assert targets.due(place) == ["due: make test-far: no run is recorded"]
    ran(place, monkeypatch, 3)
    assert "failed" in targets.due(place)[0]
    ran(place, monkeypatch, 0)
    assert targets.due(place) == []
    (place.parent / "other").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "what it does not test, and the record")
    assert targets.due(place) == []
    (place.parent / "new").write_text("1")
    assert "new changed since" in targets.due(place)[0], "also before it is committed"
    ran(place, monkeypatch, 0)
    assert "not committed" in targets.due(place)[0]


def test_a_module_of_which_only_docstrings_and_comments_changed_is_not_due(repository, monkeypatch):
    place, git = repository
    module = place.parent / "new" / "module.py"
    module.parent.mkdir()
    module.write_text('"""About."""\n\n\ndef one():\n    """Return one."""\n    return 1\n')
    git("add", "-A")
    git("commit", "-qm", "a module")
    ran(place, monkeypatch, 0)
    module.write_text("# A comment.\ndef one():\n    return 1\n")
    assert targets.due(place) == []
    module.write_text("def one():\n    return '1'\n")
    assert "module.py changed" in targets.due(place)[0]
    module.write_text("def one(:")
    assert "module.py changed" in targets.due(place)[0], "also what does not parse"
    module.unlink()
    assert "module.py changed" in targets.due(place)[0]


def test_a_part_of_a_target_is_not_recorded(repository, monkeypatch):
    place, _ = repository
    ran(place, monkeypatch, 0, "--partial")
    assert targets.due(place) == ["due: make test-far: no run is recorded"]


def test_without_a_repository_nothing_is_due(tmp_path):
    (tmp_path / "targets.toml").write_text(MANIFEST)
    assert targets.due(tmp_path) == []


def test_each_target_records_its_runs_and_each_path_is_there():
    made = (ROOT / "Makefile").read_text()
    for name, paths in targets.paths_of(ROOT / "tests").items():
        assert "$(RECORDED)" in made.partition(f"\n{name}:")[2].partition("\n\n")[0], name
        assert [path for path in paths if not (ROOT / path).exists()] == []
