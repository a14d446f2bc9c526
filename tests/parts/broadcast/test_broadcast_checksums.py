"""Checksums of what a broadcast carries: that of a device is tried in main memory, where it gives the same."""

import pytest
import torch

from syncd.parts.broadcast.packing import ByteChecksum, WordChecksum, make_checksum

CPU = torch.device("cpu")
MIB = 1 << 20


def words():
    return WordChecksum(CPU)


def summed(buckets, made=words):
    checksum = made()
    for bucket in buckets:
        checksum.add(bucket)
    return checksum.text()


def content(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_hand(buckets):
    """The same sum in whole numbers of Python."""
    total, mask = 0, (1 << 64) - 1
    for bucket in buckets:
        data = bytes(bucket.tolist())
        data += bytes(-len(data) % 8)
        part = 0
        for place in range(len(data) // 8):
            spread = (place + 1) * 0x61C8864680B583EB & mask
            signed = spread - (1 << 64) if spread >> 63 else spread
            weight = ((spread ^ signed >> 32) * 0x369DEA0F31A53F85 | 1) & mask
            part += int.from_bytes(data[place * 8 : place * 8 + 8], "little") * weight
        total = (total * 0x5851F42D4C957F2D + part) & mask
    return f"words64:{total:016x}"


@pytest.mark.parametrize("sizes", [[8], [16, 24], [4096, 4096, 13], [7], [1]])
def test_the_word_checksum_matches_the_documented_formula(sizes):
    buckets = [content(size, seed) for seed, size in enumerate(sizes)]
    assert summed(buckets) == by_hand(buckets)


def test_main_memory_is_checked_by_xxh3_and_devices_by_words():
    assert isinstance(make_checksum(CPU), ByteChecksum)
    assert isinstance(make_checksum(torch.device("meta")), WordChecksum)
    assert summed([content(64)], ByteChecksum).startswith("xxh3_128:")


@pytest.mark.parametrize("made", [ByteChecksum, words])
@pytest.mark.parametrize("place", [0, 1, 4095, 8 * MIB, 9 * MIB - 1, 9 * MIB + 4])
def test_every_flipped_bit_changes_the_checksum(made, place):
    buckets = [content(9 * MIB), content(13, 1)]
    before = summed(buckets, made)
    where, offset = divmod(place, 9 * MIB)
    buckets[where][offset] ^= 1 << place % 8
    assert summed(buckets, made) != before


@pytest.mark.parametrize("made", [ByteChecksum, words])
def test_the_checksum_depends_on_order(made):
    first, second = content(4096, 1), content(4096, 2)
    assert summed([first, second], made) != summed([second, first], made)
    turned = first.view(torch.int64).flip(0).view(torch.uint8)
    assert summed([turned], made) != summed([first], made)


def test_the_checksum_is_independent_of_a_bucket_s_address():
    memory = content(4096)
    assert summed([memory[3:1003]]) == summed([memory[3:1003].clone()])
