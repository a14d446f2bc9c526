"""Which back end carries a broadcast, for all that the sides may be."""

import itertools
from dataclasses import asdict

import pytest

from syncd.protocol.backend import GLOO, KEY, NCCL, Gpu, choose_backend, gpu_in

HERE, THERE, ELSEWHERE, OLDER = (Gpu("0a", "2.27"), Gpu("1b", "2.27"), Gpu("2c", "2.27"), Gpu("3d", "2.26"))
GPUS = [None, HERE, THERE, ELSEWHERE, OLDER]
SIDES = list(itertools.product(GPUS, GPUS, GPUS, [False, True]))


@pytest.mark.parametrize(("sender", "first", "second", "has_failed"), SIDES)
def test_nccl_is_chosen_only_for_distinct_gpus_with_one_nccl_version(sender, first, second, has_failed):
    every = [sender, first, second]
    wanted = (
        not has_failed
        and None not in every
        and len({gpu.uuid for gpu in every}) == len(every)
        and len({gpu.nccl for gpu in every}) == 1
    )
    assert (
        choose_backend(sender, {"a": first, "b": second}, has_failed=has_failed).backend == NCCL
    ) is wanted


@pytest.mark.parametrize(
    ("sender", "members", "has_failed", "said"),
    [
        (None, {"a": THERE}, False, "not on a GPU"),
        (HERE, {"a": THERE}, True, "has failed"),
        (HERE, {"a": THERE, "b": None}, False, "explorer b has no GPU"),
        (HERE, {"a": HERE}, False, "explorer a shares its GPU with the trainer"),
        (HERE, {"a": THERE, "b": THERE}, False, "explorer b shares its GPU with explorer a"),
        (HERE, {"a": OLDER}, False, "explorer a has NCCL 2.26, the trainer 2.27"),
    ],
)
def test_gloo_is_chosen_with_the_reason_against_nccl(sender, members, has_failed, said):
    chosen = choose_backend(sender, members, has_failed=has_failed)
    assert chosen.backend == GLOO
    assert said in chosen.reason


def test_a_gpu_is_read_back_from_a_presence():
    assert gpu_in({KEY: asdict(HERE), "other": 1}) == HERE


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"broadcast": "gloo"},
        {KEY: "0a"},
        {KEY: {"uuid": "0a"}},
        {KEY: {"uuid": "", "nccl": "2.27"}},
        {KEY: {"uuid": "0a", "nccl": ""}},
        {KEY: {"uuid": 1, "nccl": "2.27"}},
        {KEY: None},
    ],
)
def test_an_unreadable_gpu_field_counts_as_no_gpu(info):
    assert gpu_in(info) is None
