"""Who could change what a path leads to: levels of real directories, as two users."""

import os
import stat
import subprocess

import pytest

from syncd.protocol.path_trust import weak_level

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")


@pytest.fixture
def place(tmp_path):
    """Return a directory of this user's alone, with a file two levels below it."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_text("x")
    for path in (tmp_path, tmp_path / "a", tmp_path / "a/b"):
        path.chmod(0o755)
    (tmp_path / "a/b/file").chmod(0o644)
    return tmp_path


def weak(path, **how):
    found = weak_level(str(path), **how)
    return found and found.path


def test_what_this_user_and_root_alone_can_change_passes(place):
    assert weak(place / "a/b/file") is None
    assert weak(place / "a/b") is None


@pytest.mark.parametrize("name", ["a/b/file", "a/b", "a"])
@pytest.mark.parametrize("bit", [stat.S_IWOTH, stat.S_IWGRP])
def test_each_level_that_others_can_write_to_is_named(place, name, bit):
    (place / name).chmod((place / name).stat().st_mode | bit)
    found = weak_level(str(place / "a/b/file"))
    assert found.path == str(place / name)
    subprocess.run(found.mend.split(), check=True)
    assert weak(place / "a/b/file") is None


def test_a_sticky_directory_passes_unless_new_names_in_it_matter(place):
    (place / "a").chmod(0o1777)
    (place / "a/b").chmod(0o1777)
    assert weak(place / "a/b/file") is None
    assert weak(place / "a/b") is None
    assert weak(place / "a/b", gains=True) == str(place / "a/b")
    (place / "a/b").chmod(0o1755)
    assert weak(place / "a/b", gains=True) is None, "above it a sticky directory passes"


@as_root
@pytest.mark.parametrize("name", ["a/b/file", "a/b", "a"])
def test_each_level_of_another_user_is_named(place, name):
    os.chown(place / name, NOBODY, NOBODY)
    assert weak(place / "a/b/file") == str(place / name)


@as_root
def test_what_another_user_has_in_a_sticky_directory_is_his(place):
    (place / "a").chmod(0o1777)
    os.chown(place / "a/b", NOBODY, NOBODY)
    assert weak(place / "a/b/file") == str(place / "a/b")
    os.chown(place / "a/b", 0, 0)
    os.chown(place / "a", NOBODY, NOBODY)
    assert weak(place / "a/b/file") == str(place / "a"), "its owner renames what he likes"


def test_links_are_followed_and_what_they_lie_in_counts(place):
    (place / "open").mkdir()
    (place / "open/link").symlink_to("../a/b")
    (place / "direct").symlink_to(place / "open/link/file")
    assert weak(place / "direct") is None
    (place / "open").chmod(0o777)
    assert weak(place / "direct") == str(place / "open"), "whoever writes there points the link elsewhere"
    (place / "open").chmod(0o1777)
    assert weak(place / "direct") is None
    if os.geteuid() == 0:
        os.lchown(place / "open/link", NOBODY, NOBODY)
        assert weak(place / "direct") == str(place / "open/link")


def test_two_dots_behind_a_link_are_of_what_it_leads_to(place):
    (place / "far/b").mkdir(parents=True)
    (place / "far/b/file").write_text("other")
    (place / "link").symlink_to("far/b")
    (place / "far").chmod(0o777)
    assert weak(f"{place}/link/../b/file") == str(place / "far")


def test_a_circle_of_links_ends(place):
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        weak_level(str(place / "one"))


def test_a_relative_path_is_of_the_working_directory(place, monkeypatch):
    monkeypatch.chdir(place / "a")
    assert weak("b/file") is None
    (place / "a").chmod(0o777)
    assert weak("b/file") == str(place / "a")


def test_what_was_read_must_be_what_the_path_leads_to(place):
    status = os.stat(place / "a/b/file")
    assert weak(place / "a/b/file", opened=status) is None
    (place / "a/b/new").write_text("y")
    os.rename(place / "a/b/new", place / "a/b/file")
    assert weak(place / "a/b/file", opened=status) == str(place / "a/b/file")
