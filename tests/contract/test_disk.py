"""The contract of the seam to the file system: the real disk and the simulator's keep it alike."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from simulator.disk import SimDisk
from simulator.host import Caching, Host
from simulator.tree import Tree

from syncd.errors import CorruptDataError
from syncd.protocol.disk import (
    DirectoryEntry,
    Disk,
    exists,
    is_temporary,
    list_if_there,
    remove_tree,
    temporary_name,
)
from syncd.protocol.local_disk import LocalDisk


class Bed:
    """A disk, an empty directory on it, and a way to plant a link."""

    def __init__(self, disk: Disk, root: str, link: Callable[[str], None]) -> None:
        self.disk, self.root, self.link = disk, root, link

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"


def local_bed(tmp_path: Path) -> Bed:
    return Bed(LocalDisk(), str(tmp_path), lambda path: Path(path).symlink_to("nowhere"))


def simulated_bed(caching: Caching, *, coarse: bool = False) -> Bed:
    tree = Tree(lambda: 1.0, coarse=coarse)
    host = Host("host", tree, lambda: 1.0, caching)
    base = tree.make_directory(tree.root, "base")
    return Bed(SimDisk(host), "/base", lambda path: tree.link(base, path.rpartition("/")[2]))


@pytest.fixture(params=["local", "simulated", "simulated-nfs4", "simulated-nfs3"])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Bed:
    if request.param == "local":
        return local_bed(tmp_path)
    if request.param == "simulated":
        return simulated_bed(Caching())
    return simulated_bed(Caching(names=30.0, attributes=3.0), coarse=request.param.endswith("3"))


def names(bed: Bed, path: str = "") -> set[str]:
    return {entry.name for entry in bed.disk.list(bed.path(path) if path else bed.root)}


def test_replace_creates_and_replaces(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"one")
    assert bed.disk.read(bed.path("a")) == b"one"
    bed.disk.replace(bed.path("a"), b"two and more")
    assert bed.disk.read(bed.path("a")) == b"two and more"
    assert names(bed) == {"a"}


def test_replace_accepts_an_iterable_of_pieces(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), (part for part in (b"one ", b"", memoryview(b"two"))))
    assert bed.disk.read(bed.path("a")) == b"one two"


def test_replace_creates_a_new_inode(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"one")
    before = bed.disk.stat(bed.path("a"))
    bed.disk.replace(bed.path("a"), b"two")
    assert bed.disk.stat(bed.path("a")).inode != before.inode


def test_replace_via_another_directory_leaves_nothing_there(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("stage"))
    bed.disk.replace(bed.path("a"), b"one", via=bed.path("stage"))
    assert bed.disk.read(bed.path("a")) == b"one"
    assert names(bed, "stage") == set()


def test_replace_fails_once_its_stage_is_removed(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("stage"))
    bed.disk.replace(bed.path("a"), b"one", via=bed.path("stage"))
    bed.disk.remove_directory(bed.path("stage"))
    with pytest.raises(FileNotFoundError):
        bed.disk.replace(bed.path("a"), b"two", via=bed.path("stage"))
    assert bed.disk.read(bed.path("a")) == b"one"


def test_a_failed_replace_leaves_no_temporary_file(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("gone"))
    bed.disk.remove_directory(bed.path("gone"))
    with pytest.raises(FileNotFoundError):
        bed.disk.replace(bed.path("gone/a"), b"one")
    assert names(bed) == set()


def test_a_replace_with_failing_pieces_keeps_the_old_content(bed: Bed) -> None:
    def pieces() -> "object":
        yield b"half"
        raise RuntimeError

    bed.disk.replace(bed.path("a"), b"one")
    with pytest.raises(RuntimeError):
        bed.disk.replace(bed.path("a"), pieces())
    assert bed.disk.read(bed.path("a")) == b"one"
    assert names(bed) == {"a"}


def test_read_refuses_a_file_over_the_limit(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"12345")
    assert bed.disk.read(bed.path("a"), 5) == b"12345"
    with pytest.raises(CorruptDataError):
        bed.disk.read(bed.path("a"), 4)


@pytest.mark.parametrize(
    "read", [lambda disk, path: disk.read(path), lambda disk, path: disk.read_at(path, 0, 1)]
)
def test_reads_refuse_directories_and_symbolic_links(bed: Bed, read: Callable[[Disk, str], bytes]) -> None:
    bed.disk.make_directory(bed.path("d"))
    bed.link(bed.path("link"))
    for name in ("d", "link"):
        with pytest.raises(CorruptDataError):
            read(bed.disk, bed.path(name))
    with pytest.raises(FileNotFoundError):
        read(bed.disk, bed.path("none"))


def test_read_at_returns_less_only_at_the_end(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"0123456789")
    assert bed.disk.read_at(bed.path("a"), 2, 3) == b"234"
    assert bed.disk.read_at(bed.path("a"), 8, 5) == b"89"
    assert bed.disk.read_at(bed.path("a"), 10, 5) == b""


def test_stat_returns_kind_and_size(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"12345")
    bed.disk.make_directory(bed.path("d"))
    bed.link(bed.path("link"))
    assert bed.disk.stat(bed.path("a"))[:2] == ("file", 5)
    assert bed.disk.stat(bed.path("d")).kind == "directory"
    assert bed.disk.stat(bed.path("link")).kind == "other"
    with pytest.raises(FileNotFoundError):
        bed.disk.stat(bed.path("none"))
    with pytest.raises(NotADirectoryError):
        bed.disk.stat(bed.path("a/b"))


def test_list_returns_names_and_kinds(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"")
    bed.disk.make_directory(bed.path("d"))
    bed.link(bed.path("link"))
    assert set(bed.disk.list(bed.root)) == {
        DirectoryEntry("a", "file"),
        DirectoryEntry("d", "directory"),
        DirectoryEntry("link", "other"),
    }


def test_list_needs_a_directory(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"")
    with pytest.raises(FileNotFoundError):
        bed.disk.list(bed.path("none"))
    with pytest.raises(NotADirectoryError):
        bed.disk.list(bed.path("a"))
    assert list_if_there(bed.disk, bed.path("none")) == []


def test_refresh_needs_a_directory(bed: Bed) -> None:
    bed.disk.refresh(bed.root)
    with pytest.raises(FileNotFoundError):
        bed.disk.refresh(bed.path("none"))


def test_rename_moves_a_file_over_another(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"one")
    bed.disk.replace(bed.path("b"), b"two")
    bed.disk.rename(bed.path("a"), bed.path("b"))
    assert names(bed) == {"b"}
    assert bed.disk.read(bed.path("b")) == b"one"


def test_rename_moves_a_directory_with_all_in_it(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d/e"))
    bed.disk.make_directory(bed.path("trash"))
    bed.disk.replace(bed.path("d/e/a"), b"one")
    bed.disk.rename(bed.path("d"), bed.path("trash/d"))
    assert names(bed) == {"trash"}
    assert bed.disk.read(bed.path("trash/d/e/a")) == b"one"


def test_rename_replaces_only_an_empty_directory(bed: Bed) -> None:
    for name in ("d", "empty", "full"):
        bed.disk.make_directory(bed.path(name))
    bed.disk.replace(bed.path("d/a"), b"")
    bed.disk.replace(bed.path("full/b"), b"")
    with pytest.raises(OSError, match="not empty") as raised:
        bed.disk.rename(bed.path("d"), bed.path("full"))
    assert raised.value.errno == errno.ENOTEMPTY
    bed.disk.rename(bed.path("d"), bed.path("empty"))
    assert names(bed) == {"empty", "full"}
    assert names(bed, "empty") == {"a"}


def test_rename_does_not_mix_files_and_directories(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d"))
    bed.disk.replace(bed.path("a"), b"")
    with pytest.raises(NotADirectoryError):
        bed.disk.rename(bed.path("d"), bed.path("a"))
    with pytest.raises(IsADirectoryError):
        bed.disk.rename(bed.path("a"), bed.path("d"))


def test_rename_needs_both_ends(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"")
    with pytest.raises(FileNotFoundError):
        bed.disk.rename(bed.path("none"), bed.path("b"))
    with pytest.raises(FileNotFoundError):
        bed.disk.rename(bed.path("a"), bed.path("none/b"))
    assert names(bed) == {"a"}


def test_a_directory_cannot_be_renamed_into_itself(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d/e"))
    with pytest.raises(OSError, match="Invalid"):
        bed.disk.rename(bed.path("d"), bed.path("d/e/f"))


def test_make_directory_makes_parents_and_may_be_repeated(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d/e/f"))
    bed.disk.make_directory(bed.path("d/e/f"))
    assert names(bed, "d/e") == {"f"}


def test_remove_directory_removes_only_an_empty_one(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d"))
    bed.disk.replace(bed.path("d/a"), b"")
    with pytest.raises(OSError, match="not empty") as raised:
        bed.disk.remove_directory(bed.path("d"))
    assert raised.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        bed.disk.remove_directory(bed.path("d/a"))
    bed.disk.unlink(bed.path("d/a"))
    bed.disk.remove_directory(bed.path("d"))
    with pytest.raises(FileNotFoundError):
        bed.disk.remove_directory(bed.path("d"))


def test_nothing_can_be_created_in_a_removed_directory(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d"))
    bed.disk.remove_directory(bed.path("d"))
    with pytest.raises(FileNotFoundError):
        bed.disk.replace(bed.path("d/a"), b"")
    with pytest.raises(FileNotFoundError):
        bed.disk.sync_directory(bed.path("d"))


def test_unlink_removes_files_and_links(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"")
    bed.disk.make_directory(bed.path("d"))
    bed.link(bed.path("link"))
    bed.disk.unlink(bed.path("a"))
    bed.disk.unlink(bed.path("link"))
    with pytest.raises(FileNotFoundError):
        bed.disk.unlink(bed.path("a"))
    with pytest.raises(IsADirectoryError):
        bed.disk.unlink(bed.path("d"))
    assert names(bed) == {"d"}


def test_sync_directory_needs_a_directory(bed: Bed) -> None:
    bed.disk.replace(bed.path("a"), b"")
    bed.disk.sync_directory(bed.root)
    with pytest.raises(NotADirectoryError):
        bed.disk.sync_directory(bed.path("a"))


def test_free_returns_a_positive_number_of_bytes(bed: Bed) -> None:
    assert bed.disk.free(bed.root) > 0


def test_the_birth_time_of_a_directory_survives_changes_and_renames(bed: Bed) -> None:
    bed.disk.make_directory(f"{bed.root}/made")
    born = bed.disk.born(f"{bed.root}/made")
    bed.disk.replace(f"{bed.root}/made/file", b"x")
    bed.disk.rename(f"{bed.root}/made", f"{bed.root}/moved")
    assert bed.disk.born(f"{bed.root}/moved") == born >= 0


def test_inodes_returns_a_positive_number_or_none(bed: Bed) -> None:
    inodes = bed.disk.inodes(bed.root)
    assert inodes is None or inodes > 0


def test_exists_and_remove_tree_work_on_any_disk(bed: Bed) -> None:
    bed.disk.make_directory(bed.path("d/e"))
    bed.disk.replace(bed.path("d/a"), b"")
    bed.disk.replace(bed.path("d/e/b"), b"")
    assert exists(bed.disk, bed.path("d/e/b"))
    assert remove_tree(bed.disk, bed.path("d")) == 2
    assert not exists(bed.disk, bed.path("d"))
    assert remove_tree(bed.disk, bed.path("d")) == 0


def test_temporary_names_are_distinct_from_protocol_names() -> None:
    assert is_temporary(temporary_name("version.json"))
    assert not is_temporary("version.json")
