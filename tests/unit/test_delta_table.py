"""Tiles, tables and roots of deltas: what a container says is checked against its files before anything is read."""

import errno
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import shard_bytes

from syncd.errors import CorruptDataError, StorageError
from syncd.protocol.delta import (
    TILE,
    Target,
    Tile,
    encode_frame_record,
    encode_targets,
    read_table,
    tiles,
)
from syncd.protocol.disk import FileStat
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.safetensors import encode_header, parse_header
from syncd.protocol.tile_digests import FileRoot, TileHasher, roots_of, step_root
from syncd.transports.delta import encode
from syncd.transports.delta.container import NewContainer

DISK = LocalDisk()
ONE, TWO = Target("actor/one.safetensors", 600), Target("actor/two.safetensors", 100)


class Memory(LocalDisk):
    """One file, in memory."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def stat(self, path):
        return FileStat("file", len(self.data), 0, 0)

    def read_at(self, path, offset, length):
        return bytes(self.data[offset : offset + length])


def frames():
    """Return frames that tile two targets."""
    random = np.random.default_rng(0)
    made = []
    for target, offset, length in ((0, 0, 200), (0, 200, 400), (1, 0, 100)):
        old = random.integers(0, 1 << 16, length // 2).astype(np.uint16)
        new = old.copy()
        new[length // 8] += 1
        made.append(encode(old, new, offset=offset, target=target))
    return made


def container(path, made, targets=(ONE, TWO)):
    with NewContainer(targets) as new:
        for frame in made:
            new.add(frame)
        path.write_bytes(b"".join(new.pieces()))
    return str(path)


def test_changes_for_which_the_host_has_no_room_name_its_temporary_directory(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("syncd.transports.delta.container.STREAMS_IN_MEMORY", 1)
    assert len(container_bytes(tmp_path)) > 1
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StorageError, match="No space left on device") as ended:
        container_bytes(tmp_path)
    assert (ended.value.path, "TMPDIR" in ended.value.hint) == (tempfile.gettempdir(), True)


def container_bytes(place):
    with open(container(place / "made", frames()), "rb") as file:
        return file.read()


def header_of(*tensors):
    """Return the header of a file of tensors (dtype, elements, bytes)."""
    named = [(f"t{number:03d}", dtype, (count,), size) for number, (dtype, count, size) in enumerate(tensors)]
    text = encode_header(named)
    return parse_header(text, len(text) + sum(size for *_, size in named))


def test_tiles_follow_the_widths_of_tensors_and_cover_each_byte():
    header = header_of(
        ("BF16", 5 << 20, 10 << 20), ("F16", 3, 6), ("F32", 0, 0), ("BF16", 1, 2), ("F32", 2, 8), ("F8_E4M3", 5, 5)
    )  # fmt: skip
    begin = header.data_offset
    assert list(tiles(header)) == [
        Tile(0, begin, 1),
        Tile(begin, TILE, 2),
        Tile(begin + TILE, (2 << 20) + 8, 2),  # the empty tensor between ends no run
        Tile(begin + (10 << 20) + 8, 8, 4),
        Tile(begin + (10 << 20) + 16, 5, 1),
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8)]), st.integers(0, 9)))
)
def test_tiles_are_whole_words_without_a_hole(given_tensors):
    header = header_of(*((dtype, count, size * count) for (dtype, size), count in given_tensors))
    at = 0
    for tile in tiles(header):
        assert tile.offset == at
        assert tile.length % tile.width == 0
        assert 0 < tile.length <= TILE
        at += tile.length
    assert at == header.size


def test_the_root_of_a_file_is_the_same_however_its_bytes_come():
    content = shard_bytes({"a": (300, 70), "b": (5,)})
    header = parse_header(content, len(content))
    import xxhash

    by_hand = FileRoot()
    for tile in tiles(header):
        piece = content[tile.offset : tile.offset + tile.length]
        by_hand.add_tile(tile.offset, tile.length, xxhash.xxh3_128_digest(piece))
    for size in (1000, 4096, len(content)):
        hasher = TileHasher(header)
        for at in range(0, len(content), size):
            hasher.feed(content[at : at + size])
        assert hasher.hexdigest() == by_hand.hexdigest()


def test_a_table_round_trips_with_the_places_of_its_streams(tmp_path):
    made = frames()
    path = container(tmp_path / "c", made)
    table = read_table(DISK, path)
    assert table.targets == (ONE, TWO)
    assert list(table.frames) == [frame.frame for frame in made]
    data = (tmp_path / "c").read_bytes()
    found = [(frame, at) for frames_of in table.by_target() for frame, at in frames_of]
    for (frame, at), encoded in zip(found, made, strict=True):
        assert data[at : at + frame.stored] == b"".join(encoded.streams)


def test_roots_depend_on_content_and_not_on_the_order_of_containers(tmp_path):
    made = frames()
    whole = read_table(DISK, container(tmp_path / "whole", made))
    first = read_table(DISK, container(tmp_path / "1", made[:2], (ONE,)))
    last = encode(b"ab" * 50, b"ab" * 49 + b"ac", target=0)
    second = read_table(DISK, container(tmp_path / "2", [last], (TWO,)))
    third = read_table(DISK, container(tmp_path / "3", [_moved(made[2])], (TWO,)))
    assert roots_of([first, third]) == roots_of([third, first]) == roots_of([whole])
    assert roots_of([first, second]) != roots_of([whole])
    before, after = roots_of([whole])
    assert before != after
    assert step_root({}) != before


def _moved(encoded):
    """Return the frame of the second target as that of the first."""
    from dataclasses import replace

    return replace(encoded, frame=encoded.frame._replace(target=0))


def damaged_tables():
    made = frames()
    first, second, third = made
    yield "a hole", [first, third]
    yield "an end that is missing", made[:2]
    yield "no frames", []
    yield "frames out of order", [second, first, third]
    yield "a frame twice", [first, first, second, third]
    yield "more than the file has", [*made, third]
    yield "a frame of no target", [*made[:2], encode(bytes(100), b"\1" * 100, target=2)]


@pytest.mark.parametrize(("name", "made"), list(damaged_tables()))
def test_frames_that_do_not_tile_their_targets_are_refused(name, made, tmp_path):
    with pytest.raises(CorruptDataError, match=r"out of place|do not cover"):
        read_table(DISK, container(tmp_path / "c", made))


@pytest.mark.parametrize(
    "targets",
    [
        b"", b"{}", b"[1]", b'[["a",1,2]]', b'[["a",-1]]', b'[["a",true]]', b'[["../a",600]]', b'[["/a",600]]',
        b"[" * 9999,
        b'[["a",600],["a",100]]', b'[["a",600.0]]', b"[[1,600]]", b"\xff",
    ],
)  # fmt: skip
def test_a_list_of_targets_that_is_none_is_refused(targets, tmp_path):
    made = frames()
    records = b"".join(encode_frame_record(frame.frame) for frame in made)
    streams = b"".join(b"".join(frame.streams) for frame in made)
    write_parts(tmp_path / "c", targets, records, streams)
    with pytest.raises(CorruptDataError):
        read_table(DISK, str(tmp_path / "c"))


def write_parts(path, targets, records, streams, names=("targets-00001", "frames-00001", "streams-00001")):
    parts = (targets, records, streams)
    header = encode_header(
        [(name, "U8", (len(part),), len(part)) for name, part in zip(names, parts, strict=True)]
    )
    path.write_bytes(header + b"".join(parts))


def test_parts_that_do_not_fit_each_other_are_refused(tmp_path):
    made = frames()
    targets = encode_targets((ONE, TWO))
    records = b"".join(encode_frame_record(frame.frame) for frame in made)
    streams = b"".join(b"".join(frame.streams) for frame in made)
    write_parts(tmp_path / "good", targets, records, streams)
    assert read_table(DISK, str(tmp_path / "good")).targets == (ONE, TWO)
    for number, parts in enumerate(
        [
            (targets, records[:-1], streams),
            (targets, records, streams[:-1]),
            (targets, records, streams + b"x"),
        ]
    ):
        write_parts(tmp_path / str(number), *parts)
        with pytest.raises(CorruptDataError):
            read_table(DISK, str(tmp_path / str(number)))
    for number, names in enumerate([("a", "b", "c"), ("frames-00001", "targets-00001", "streams-00001")]):
        write_parts(tmp_path / f"n{number}", targets, records, streams, names)
        with pytest.raises(CorruptDataError, match="not the container of a delta"):
            read_table(DISK, str(tmp_path / f"n{number}"))


def test_every_truncation_of_a_container_is_refused(tmp_path):
    container(tmp_path / "whole", frames())
    data = (tmp_path / "whole").read_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptDataError):
            read_table(Memory(data[:length]), "/c")
    assert read_table(Memory(data), "/c")


def test_every_flipped_bit_of_the_records_changes_the_table_or_is_refused(tmp_path):
    """What passes is seen by the roots, the counts, or the checksum that each frame is applied with."""
    from syncd.protocol.delta import frame_checksum

    made = frames()
    table = read_table(DISK, container(tmp_path / "c", made))
    data = (tmp_path / "c").read_bytes()
    begin = table.streams_at - 80 * len(made)
    for bit in range(8 * begin, 8 * table.streams_at):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = read_table(Memory(flipped), "/c")
        except CorruptDataError:
            continue
        number = (bit // 8 - begin) // 80
        frame = found.frames[number]
        assert frame != table.frames[number]
        assert frame_checksum(frame, made[number].streams) != frame.checksum
