"""Each replica behind one address is asked for log-probs: one that kept its old weights shows."""

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from support.engine_beds import SmallLoraBed, SmallSglangBed, SmallVllmBed
from support.probe_contract import CLOSE, FAR, ROWS, difference, load_and_probe, stale

from explorer_hooks.proof.parameter_check import Moved, moved
from syncd.errors import LoadFailedError


@pytest.fixture(params=[SmallVllmBed, SmallSglangBed])
def bed(request, tmp_path):
    made = request.param(tmp_path)
    made.engine.replicas = 2
    with made:
        yield made


def test_each_replica_answers_and_one_that_kept_its_weights_shows(bed):
    hook, target = bed.open(), bed.target((1, 10))
    right = load_and_probe(bed, hook, target)
    assert [difference(one, bed.model(target))[1] < CLOSE for one in (right, *right.others)] == [True, True]
    assert [stale(one) < CLOSE for one in (right, *right.others)] == [True, True]
    before = hook.checksums()
    assert list(before) == ["dp0", "dp1"]
    bed.engine.stale = {1: bed.engine.weights}
    following = bed.target((1, 11))
    answer = load_and_probe(bed, hook, following)
    assert difference(answer, bed.model(following))[1] < CLOSE
    assert difference(answer.others[0], bed.model(following))[0] > FAR
    assert moved(before, hook.checksums()) is Moved.UNCHANGED


def test_each_replica_is_asked_for_an_adapter(tmp_path):
    with SmallLoraBed(tmp_path) as bed:
        hook, target = bed.open(), bed.target((1, 10))
        right = load_and_probe(bed, hook, target)
        assert (right.others, bed.engine.asked_ranks) == ((), [None])
        bed.engine.replicas = 3
        answer = hook.probe(target, ROWS)
        assert bed.engine.asked_ranks[1:] == ["0", "1", "2"]
        assert [one.logprobs for one in answer.others] == [right.logprobs] * 2


def test_an_engine_of_one_replica_is_asked_once(bed):
    bed.engine.replicas = 1
    assert bed.open().probe(None, ROWS).others == ()
    asked = [body for path, body in bed.engine.seen if path in ("POST /v1/completions", "POST /generate")]
    assert len(asked) == 2
    assert not any("routed_dp_rank" in body for body in asked)


def test_an_sglang_that_does_not_know_replicas_proves_nothing(tmp_path):
    with SmallSglangBed(tmp_path) as bed:
        bed.engine.replicas, bed.engine.knows_replicas = 2, False
        with pytest.raises(LoadFailedError, match="replica 1 was asked, and 0 has answered"):
            bed.open().probe(None, ROWS)


@pytest.mark.parametrize(
    ("parallel", "asked"),
    [
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, 1),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 2),
        ({"data_parallel_size": "many"}, 1),
    ],
)
def test_a_vllm_that_passes_requests_to_some_replicas_is_asked_for_these(tmp_path, parallel, asked):
    with SmallVllmBed(tmp_path) as bed:
        config = {"model_config": {}, "parallel_config": parallel}
        bed.engine.replies["/server_info"] = lambda: {"vllm_config": config}
        assert len(bed.open().probe(None, ROWS).others) == asked - 1


def test_packed_parameters_give_no_checksum(tmp_path):
    with SmallVllmBed(tmp_path) as bed:
        hook, target = bed.open(), bed.target((1, 10))
        packed = "model.layers.0.mlp.up_proj.weight"
        bed.engine.packed = {packed}
        before = hook.checksums()
        assert [name for name, checksum in before["dp0"].items() if not checksum] == [
            f"pp0:pcp0:tp0:{packed}"
        ]
        bed.engine.fault = "label without load"
        load_and_probe(bed, hook, target)
        assert moved(before, hook.checksums()) is Moved.HIDDEN


@pytest.mark.parametrize(
    "answer", [{}, [], {"checksums": []}, {"checksums": {"dp0:a": 7}}, {"ranks": [{"checksums": {}}]}]
)
def test_what_is_no_list_of_checksums_is_none(bed, answer):
    path = "/weight_checker" if isinstance(bed, SmallVllmBed) else "/weights_checker"
    bed.engine.replies[path] = lambda: answer
    assert bed.open().checksums() is None


def test_an_engine_without_the_route_gives_none(bed):
    bed.engine.post_weight_checker = bed.engine.post_weights_checker = None
    assert bed.open().checksums() is None
