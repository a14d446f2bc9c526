"""Whether an engine's checksums show that it loaded a version: which are asked for, and what two of them say."""

import itertools
import os
from dataclasses import replace

import pytest
from support.jobs import ManualClock, shard_bytes
from support.targets import target_of

from explorer_hooks.proof.parameter_check import (
    Moved,
    ParameterCheck,
    distance,
    first_difference,
    is_needed,
    moved,
)
from syncd.protocol.probe import Probe

TOKENS = ((5, 6, 7), (8, 9))
SHAPES = {"model.a": (4, 2), "model.b": (3,)}


def probe_of(by=0.0, tokens=TOKENS):
    return Probe(tokens, ((-1.0 + by, -2.0), (-3.0,)), "float32", "float32")


def version(place, step, salt, by=0.0, shapes=None):
    """Return a version whose weights follow from a number."""
    os.makedirs(f"{place}/{step}")
    with open(f"{place}/{step}/model-00001-of-00001.safetensors", "wb") as file:
        file.write(shard_bytes(shapes or SHAPES, salt))
    return replace(target_of(f"{place}/{step}", (1, step)), probe=probe_of(by))


class Summing:
    """A hook that gives the checksums that it is told."""

    def __init__(self, clock, *answers, dtype="float32", seconds=0.0):
        self.clock, self.answers, self._dtype, self.seconds, self.asked = (
            clock,
            list(answers),
            dtype,
            seconds,
            0,
        )

    def checksums(self):
        self.asked += 1
        self.clock.sleep(self.seconds)
        return self.answers.pop(0)

    def dtype(self):
        return self._dtype


def checking(*answers, **options):
    clock = ManualClock()
    hook = Summing(clock, *answers, **options)
    return ParameterCheck(hook, clock), hook, clock


ONE = {"dp0": {"a": "1", "b": "2"}}
OTHER = {"dp0": {"a": "1", "b": "3"}}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (ONE, OTHER, Moved.CHANGED),  # one parameter is enough: a norm may stay as it was
        (ONE, ONE, Moved.UNCHANGED),
        (ONE | {"dp1": ONE["dp0"]}, OTHER | {"dp1": ONE["dp0"]}, Moved.UNCHANGED),  # one replica stayed
        (ONE | {"dp1": ONE["dp0"]}, OTHER | {"dp1": OTHER["dp0"]}, Moved.CHANGED),
        ({"dp0": {"a": "1", "b": ""}}, {"dp0": {"a": "1", "b": ""}}, Moved.HIDDEN),
        ({"dp0": {"a": "1", "b": ""}}, {"dp0": {"a": "2", "b": ""}}, Moved.CHANGED),
    ],
)
def test_two_answers_say_whether_each_replica_has_changed(before, after, says):
    assert moved(before, after) is says


def test_two_probes_are_as_far_apart_as_their_log_probs_at_the_mean():
    assert distance(probe_of(), probe_of(by=0.3)) == pytest.approx(0.1)
    assert distance(probe_of(), probe_of(tokens=((5, 6, 8), (8, 9)))) == float("inf")


def test_checksums_are_needed_where_the_probe_of_the_version_before_would_pass(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 2, by=3e-4)
    assert is_needed(old, new, allowed=1e-4)
    assert not is_needed(old, new, allowed=4e-5)  # the probe alone tells them apart
    assert not is_needed(old, version(tmp_path, 3, 1), allowed=1.0)  # the same content
    assert not is_needed(old, replace(new, probe=None), allowed=1.0)
    assert not is_needed(replace(old, shards=()), new, allowed=1.0)


def test_an_engine_that_stayed_is_found_with_the_tensor_that_has_changed(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 2)
    check, _, _ = checking(ONE, ONE)
    check.begin(old, new, 1e-3)
    says, reason = check.end(new)
    assert says is Moved.UNCHANGED
    assert reason == "model.a has changed, and no parameter of dp0 has"


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_an_engine_that_casts_may_stay(tmp_path, dtype):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 2)
    check, _, _ = checking(ONE, ONE, dtype=dtype)
    check.begin(old, new, 1e-3)
    assert check.end(new) == (Moved.UNCHANGED, "")


def test_files_that_differ_in_other_things_than_tensors_ask_nothing_of_an_engine(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 1)
    new = replace(new, shards=tuple(one._replace(digest="xxh3_128:0") for one in new.shards))
    assert first_difference(old, new) == ""
    check, _, _ = checking(ONE, ONE)
    check.begin(old, new, 1e-3)
    assert check.end(new) == (Moved.UNCHANGED, "")


def test_a_tensor_of_another_shape_differs_and_files_that_are_gone_say_nothing(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 1, shapes={**SHAPES, "model.b": (5,)})
    assert first_difference(old, new) == "model.b"
    os.remove(f"{old.path}/{old.shards[0].name}")
    assert first_difference(old, new) == ""


def test_checksums_after_a_load_are_those_before_the_next(tmp_path):
    versions = [version(tmp_path, step, step) for step in (1, 2, 3)]
    check, hook, _ = checking(ONE, OTHER, ONE)
    for old, new in itertools.pairwise(versions):
        check.begin(old, new, 1e-3)
        assert check.end(new) == (Moved.CHANGED, "")
    assert hook.asked == 3


def test_an_engine_that_gives_none_or_need_not_says_so(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 2)
    for answers in ([None], [ONE, None]):
        check, _, _ = checking(*answers)
        check.begin(old, new, 1e-3)
        assert check.end(new) == (Moved.NOT_GIVEN, "")
    check, hook, _ = checking()
    for running in (None, replace(old, probe=probe_of(by=1.0))):
        check.begin(running, new, 1e-3)
        assert check.end(new) == (Moved.NOT_NEEDED, "")
    assert hook.asked == 0


def test_checksums_that_take_long_are_asked_for_a_twentieth_of_the_time(tmp_path):
    old, new = version(tmp_path, 1, 1), version(tmp_path, 2, 2)
    check, hook, clock = checking(ONE, OTHER, ONE, OTHER, seconds=5.0)
    for wait, says in ((0, Moved.CHANGED), (99, Moved.NOT_ASKED), (2, Moved.CHANGED)):
        clock.sleep(wait)
        check.begin(old, new, 1e-3)
        assert check.end(new) == (says, "")
    assert hook.asked == 4
