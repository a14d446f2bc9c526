"""Whether a directory of safetensors is whole: by the numbers in its names, and by its index."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.publishing.export import index_problems, missing_numbers

INDEX = "model.safetensors.index.json"


def numbered(total, first=1, stem="model", width=5):
    return [f"{stem}-{n:0{width}}-of-{total:05}.safetensors" for n in range(first, first + total)]


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        numbered(1),
        numbered(4),
        numbered(4, first=0),
        numbered(4, width=1),
        [*numbered(2), *numbered(3, stem="vision")],
        ["a-b.safetensors", "model-x-of-y.safetensors", "part-of-2.safetensors"],
    ],
)
def test_complete_sets_of_shard_names_have_no_missing_numbers(names):
    assert list(missing_numbers(names)) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (numbered(2)[:1], "shard 2 of 2 of model is missing, 1 are there"),
        (numbered(2)[1:], "shard 1 of 2 of model is missing, 1 are there"),
        (numbered(4)[::2], "shard 2 of 4 of model is missing, 2 are there"),
        (numbered(3, first=0)[:2], "shard 2 of 3 of model is missing, 2 are there"),
        (["model-00001-of-999999999.safetensors"], "shard 2 of 999999999 of model is missing, 1 are there"),
        ([*numbered(2), *numbered(3)], "shards of 2 and of 3 are mixed under the name model"),
        ([*numbered(2), "model-00003-of-00002.safetensors"], "counts beyond its total"),
        ([*numbered(2, first=0), "model-00002-of-00002.safetensors"], "counts beyond its total"),
        ([*numbered(2), *numbered(2, stem="vision")[:1]], "shard 2 of 2 of vision is missing"),
    ],
)
def test_missing_shard_numbers_are_reported(names, said):
    assert any(said in problem for problem in missing_numbers(names))


@settings(deadline=None)
@given(st.integers(1, 12), st.sampled_from([0, 1]), st.data())
def test_shard_numbers_are_complete_only_if_all_are_present(total, first, draw):
    names = numbered(total, first)
    kept = draw.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    # Without its shard 0 an export that counts from 0 reads as one that counts from 1, beyond its total.
    assert (not list(missing_numbers(kept))) == (len(kept) == total)


MAP = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
SHARDS = {"1.safetensors": {"a", "b"}, "2.safetensors": {"c"}}


@pytest.mark.parametrize(
    ("weight_map", "shards", "said"),
    [
        (MAP, SHARDS, []),
        (MAP, {**SHARDS, "1.safetensors": {"a", "b", "more"}}, []),
        (MAP, {"1.safetensors": {"a", "b"}}, ["names '2.safetensors', which does not exist"]),
        ({**MAP, "d": "2.safetensors"}, SHARDS, ["'d' in 2.safetensors, and no shard holds it"]),
        ({**MAP, "c": "1.safetensors"}, SHARDS, ["'c' in 1.safetensors, and it is in 2.safetensors"]),
        ({**MAP, "d": "../x"}, SHARDS, ["names '../x', which does not exist"]),
        ({**MAP, "d": "\x1b[2J"}, SHARDS, [r"names '\x1b[2J', which does not exist"]),
    ],
)
def test_an_index_that_contradicts_its_shards_is_reported(weight_map, shards, said):
    found = list(index_problems(INDEX, weight_map, shards))
    assert len(found) == len(said)
    assert all(part in problem for part, problem in zip(said, found, strict=True))


names = st.sampled_from(["1.safetensors", "2.safetensors", "3.safetensors"])


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcde"), names, min_size=1),
    st.dictionaries(st.sampled_from("abcde"), names),
)
def test_an_index_is_valid_only_if_every_tensor_is_in_its_named_shard(weight_map, places):
    shards = {shard: {name for name in places if places[name] == shard} for shard in set(places.values())}
    expected = all(places.get(tensor) == shard for tensor, shard in weight_map.items())
    assert (not list(index_problems(INDEX, weight_map, shards))) == expected
