"""What is read of the job's file system once, though two ask for it."""

from syncd.parts.hosts.nearer_disk import HeadsDisk
from syncd.protocol.local_disk import LocalDisk


class CountingDisk(LocalDisk):
    def __init__(self):
        super().__init__()
        self.read = []

    def read_at(self, path, offset, length, *, ahead=True):
        self.read.append((offset, length))
        return super().read_at(path, offset, length, ahead=ahead)


def test_the_beginning_of_a_file_is_read_once_and_nothing_behind_what_was_asked_for_is_kept(tmp_path):
    content = bytes(range(200))
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(content)
    origin = CountingDisk()
    disk = HeadsDisk(origin)
    for offset, length in ((0, 50), (40, 30), (70, 10), (100, 20)):
        assert disk.read_at(path, offset, length) == content[offset : offset + length]
    disk.keep_no_more()
    del origin.read[:]
    assert disk.read_at(path, 0, 80) == content[:80]
    assert disk.read_at(path, 30, 50) == content[30:80]
    assert origin.read == []
    for offset, length in ((79, 2), (80, 20), (100, 20)):
        assert disk.read_at(path, offset, length) == content[offset : offset + length]
    assert disk.read_at(path, 80, 20) == content[80:100]
    assert origin.read == [(79, 2), (80, 20), (100, 20), (80, 20)]
