"""Mounts: which file system holds a path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.protocol.mount import UNKNOWN_MOUNT, Mount, find_mount, mount_of

TEXT = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 21 0:25 / /mnt/nfs rw,relatime shared:9 master:2 - nfs4 server:/export rw,vers=4.2,actimeo=3,soft
31 21 0:26 / /mnt/nfs/deep rw - xfs /dev/sdb rw
32 21 0:27 / /mnt/with\040space rw - fuse.sshfs host:/a\040b rw
33 21 0:28 / /top rw - tmpfs below rw
34 21 0:29 / /top rw - tmpfs above rw
35 21 0:30 /sub /bind rw - lustre mds@tcp:/fs rw
not a line of it
36 21 0:31 / /short rw - ext4
"""


@pytest.mark.parametrize(
    ("path", "type_", "source"),
    [
        ("/", "ext4", "/dev/sda1"),
        ("/home/x", "ext4", "/dev/sda1"),
        ("/mnt/nfs", "nfs4", "server:/export"),
        ("/mnt/nfs/job", "nfs4", "server:/export"),
        ("/mnt/nfs/deep/job", "xfs", "/dev/sdb"),
        ("/mnt/nfsother", "ext4", "/dev/sda1"),
        ("/mnt/with space/x", "fuse.sshfs", "host:/a b"),
        ("/top/x", "tmpfs", "above"),
        ("/bind", "lustre", "mds@tcp:/fs"),
        ("/short", "ext4", "/dev/sda1"),
    ],
)
def test_the_innermost_and_topmost_mount_holds_a_path(path, type_, source):
    found = find_mount(path, TEXT)
    assert (found.type, found.source) == (type_, source)


def test_mount_and_file_system_options_are_both_found():
    mount = find_mount("/mnt/nfs", TEXT)
    assert mount.option("vers") == "4.2"
    assert mount.option("soft") == ""
    assert mount.option("hard") is None
    assert mount.option("relatime") == ""
    assert mount.options.count("rw") == 1


@pytest.mark.parametrize(
    ("network", "types"),
    [
        (True, ["nfs", "nfs4", "lustre", "fuse", "fuse.sshfs", "cifs", "gpfs", "beegfs"]),
        (False, ["ext4", "tmpfs", "xfs", "fuseblk", "overlay", "unknown"]),
    ],
)
def test_network_file_system_types_are_recognized(network, types):
    for type_ in types:
        assert Mount("/", type_).is_network is network


def test_only_nfsv4_servers_delegate():
    assert [type_ for type_ in ("nfs", "nfs4", "lustre", "ext4") if Mount("/", type_).has_delegations] == [
        "nfs4"
    ]


@given(st.text())
def test_any_mountinfo_text_is_parsed_without_an_error(text):
    assert isinstance(find_mount("/a", text), Mount)
    assert isinstance(find_mount("/a", TEXT + text), Mount)


def test_empty_mountinfo_gives_an_unknown_mount():
    assert find_mount("/a", "") == UNKNOWN_MOUNT


def test_mounts_of_this_host_are_found(tmp_path):
    found = mount_of(str(tmp_path))
    assert str(tmp_path.resolve()).startswith(found.point)
    (tmp_path / "link").symlink_to("/proc")
    assert mount_of(str(tmp_path / "link")).type == "proc"


def test_a_host_without_mountinfo_gives_an_unknown_mount(monkeypatch):
    monkeypatch.setattr("syncd.protocol.mount._MOUNTINFO", "/none")
    assert mount_of("/") == UNKNOWN_MOUNT
