"""What the trainer asks of every engine: verl's on two ranks, and one that somebody else could have written."""

import json
import math

import pytest
from support import case_runs, samples
from support.verl_release import ENGINE

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [
    pytest.mark.group("engines"),
    pytest.mark.slow,
    pytest.mark.parametrize("engine", ["tests.tiny", ENGINE]),
]


@pytest.fixture
def ranks(two_ranks, engine):
    return two_ranks(engine)[0]["contract"]


def test_what_waits_for_ranks_may_take_as_long_as_they_may(request, launch, engine):
    assert request.node.get_closest_marker("timeout").args[0] > 2 * case_runs.LONG


def test_an_engine_counts_its_steps_from_zero(ranks, engine):
    assert [(found["fresh"], found["steps"]) for found in ranks] == [(0, 4)] * 2


def test_metrics_are_finite_and_have_the_same_names_and_values_on_all_ranks(ranks, engine):
    first, second = (found["metrics"] for found in ranks)
    assert first == second
    assert len({tuple(sorted(metrics)) for metrics in first}) == 1
    assert all(
        type(value) is float and math.isfinite(value) for metrics in first for value in metrics.values()
    )
    assert {"actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "train/tokens"} <= first[
        0
    ].keys()


def test_training_steps_change_every_weight(ranks, engine):
    start, end = ranks[0]["start"], ranks[0]["end"]
    assert start.keys() == end.keys()
    assert not any(torch.equal(start[name], end[name]) for name in start)


def test_every_rank_exports_the_same_in_the_same_order(ranks, engine):
    first, second = (found["end"] for found in ranks)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_engine_reports_the_vocabulary_size_of_its_model(ranks, engine):
    assert [found["limits"].vocabulary for found in ranks] == [64 if engine == "tests.tiny" else 61] * 2


def test_tied_names_are_a_subset_of_the_exported_names(ranks, engine):
    found = ranks[0]
    assert set(found["tied"]) < set(found["end"])
    assert found["tied"] == (["lm_head.weight"] if engine == "tests.tiny" else [])


def test_training_resumes_bit_for_bit_from_a_checkpoint(ranks, engine):
    for found in ranks:
        assert found["again"] == found["metrics"][2:]
        assert all(torch.equal(found["end"][name], found["end again"][name]) for name in found["end"])
        assert set(found["files"].values()) == {True}
        assert len(found["files"]) >= 2


def test_training_resumes_at_another_number_of_ranks(ranks, one_rank, engine):
    (found,) = one_rank(engine)["other_ranks"]
    saved = ranks[0]["saved"]
    assert found["weights"].keys() == saved.keys()
    assert all(torch.equal(found["weights"][name], saved[name]) for name in saved)
    assert found["metrics"][0].keys() == ranks[0]["metrics"][0].keys()
    # The tiny engine has all weights in each file, and the last one is cut off.
    assert engine == "tests.tiny" or found["cut"][0] == "CorruptDataError"


def test_a_truncated_training_state_is_refused_on_all_ranks(two_ranks, engine):
    refusals = two_ranks(engine)[0]["cut_off"]
    assert [kind for kind, _, _ in refusals] == ["CorruptDataError"] * 2


def test_no_object_in_any_file_of_a_full_checkpoint_is_run(two_ranks, engine):
    for found in two_ranks(engine)[0]["planted"]:
        assert found["ran"] == []
        assert found["whole"] is None, "it resumes once the file is as it was"
        refused = {place: why for place, why in found["outcomes"].items() if place[0].endswith(".pt")}
        assert len(refused) >= 4
        assert all(why[0] == "CorruptDataError" for why in refused.values())
        own = [why for (_, how), why in refused.items() if how in ("saved", "beside")]
        assert engine == "tests.tiny" or all("running code" in why[1] for why in own)


def test_log_probs_cover_the_response_and_are_equal_on_all_ranks(ranks, engine):
    first, second = (found["log_probs"] for found in ranks)
    assert [len(row) for row in first] == [7, 4, 6, 2, 2, 3, 4, 8, 8, 8]
    assert all(row.dtype == torch.float32 and (row < 0).all() for row in first)
    assert all(map(torch.equal, first, second))


def test_log_probs_of_tokens_are_those_of_responses_at_temperature_1_and_equal_on_all_ranks(ranks, engine):
    first, second = (found["token_logprobs"] for found in ranks)
    rows = samples.batch_of(9).experiences
    assert first == second
    assert [len(row) for row in first] == [len(row.tokens) - 1 for row in rows]
    for found, row, response in zip(first, rows, ranks[0]["log_probs"], strict=True):
        assert all(type(value) is float for value in found)
        assert found[row.prompt_length - 1 :] == pytest.approx(response.tolist(), abs=1e-5)


def test_companion_files_are_bytes_and_include_the_model_config(ranks, engine):
    found = ranks[0]["companions"]
    assert all(isinstance(content, bytes) for content in found.values())
    assert json.loads(found["config.json"])["architectures"]


def test_an_engine_sends_its_weights_through_memory(two_ranks, engine):
    """Both ranks write one copy with the digests of the step, which goes when the engine does."""
    found = two_ranks(engine)[0].get("remembered")
    if found is None:
        pytest.skip("no /dev/shm that can be written")
    for one in found:
        assert one["holds"]
        assert one["damaged"] == []
        assert one["shards"] == 2
        assert one["methods"] == ["checkpoint", "memory"]
        sent = one["sent"]
        assert (sent.method, sent.step, sent.is_done) == ("memory", 1, True)
        assert sent.size > 0
        assert sent.seconds > 0
    assert found[0]["left"] == []
