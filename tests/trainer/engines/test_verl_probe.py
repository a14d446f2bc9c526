"""What verl's engine answers to the tokens of a probe, and that training does not notice the question."""

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytestmark = [pytest.mark.group("engines"), pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(one_rank, two_ranks):
    """Return what each rank of one and of two found."""
    return {1: one_rank("verl"), 2: two_ranks("verl")[0]}


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_log_probs_of_tokens_match_transformers_on_all_ranks(ranks, world_size, model):
    """At temperature 1, though the job samples at 0.7; after training, those of the weights that are exported."""
    for found in ranks[world_size]["probed"]:
        for when in ("fresh", "trained"):
            ours, plain = found[model, when]
            assert [len(row) for row in ours] == [7, 1, 2, 39, 3]
            assert all(type(value) is float for row in ours for value in row)
            for row, its in zip(ours, plain, strict=True):
                assert row == pytest.approx(its, abs=1e-5)
    answers = [found[model, "trained"][0] for found in ranks[world_size]["probed"]]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] != ranks[world_size]["probed"][0][model, "fresh"][0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_bit_for_bit_the_same_with_and_without_a_probe(ranks, world_size):
    for rank in ranks[world_size]["undisturbed"]:
        (metrics, weights, draw), (its_metrics, its_weights, its_draw) = rank["found"]
        assert metrics == its_metrics
        assert weights.keys() == its_weights.keys()
        assert all(torch.equal(weights[name], its_weights[name]) for name in weights)
        assert draw == its_draw
        assert set(rank["same"].values()) == {True}
        assert len(rank["same"]) >= 2
