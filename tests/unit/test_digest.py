"""Digests by name."""

import hashlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryDisk

from syncd.errors import CorruptDataError
from syncd.protocol import digest
from syncd.protocol.digest import chunks, digest_bytes, digest_file, hasher, name_of


def test_digests_match_the_reference_implementations():
    assert digest_bytes(b"abc", "sha256") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    assert digest_bytes(b"abc") == f"xxh3_128:{xxhash.xxh3_128(b'abc').hexdigest()}"
    assert digest_bytes(b"") == "xxh3_128:99aa06d3014798d86001c324468d497f"


@given(st.binary(max_size=50), st.integers(1, 9), st.sampled_from(["xxh3_128", "sha256"]))
def test_a_file_has_the_digest_of_its_bytes(data, chunk, name):
    before, digest.CHUNK = digest.CHUNK, chunk
    try:
        disk = MemoryDisk({"/a": data})
        assert digest_file(disk, "/a", name) == (digest_bytes(data, name), len(data))
        assert all(len(piece) <= chunk for piece in chunks(disk, "/a"))
    finally:
        digest.CHUNK = before


def test_the_digest_of_a_missing_file_raises_file_not_found():
    with pytest.raises(FileNotFoundError):
        digest_file(MemoryDisk(), "/a")


@pytest.mark.parametrize("name", ["md5", "", "XXH3_128"])
def test_unknown_digest_algorithms_are_refused_with_a_hint(name):
    with pytest.raises(CorruptDataError) as raised:
        hasher(name)
    assert raised.value.hint


@pytest.mark.parametrize("text", ["sha256:0a", "xxh3_128:ff"])
def test_the_algorithm_name_precedes_the_colon(text):
    assert name_of(text) == text.split(":")[0]


@pytest.mark.parametrize(
    "text",
    ["", ":", "sha256", "sha256:", ":aa", "md5:aa", "sha256:AA", "sha256:aa:bb", "sha256: aa", "sha256:٣"],
)
def test_invalid_digests_are_refused_with_the_path(text):
    with pytest.raises(CorruptDataError, match=r"not a digest.*: /a$"):
        name_of(text, "/a")


@given(st.text())
def test_any_text_is_a_digest_or_raises_a_printable_error(text):
    try:
        name_of(text)
    except CorruptDataError as error:
        str(error).encode()
