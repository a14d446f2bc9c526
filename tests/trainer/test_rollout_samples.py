"""Which rollouts are shown, and how their texts come about."""

import pytest

pytest.importorskip("pyarrow", reason="experiences need pyarrow")

from support.experiences import make, segmented

from trainer.experience.batch import Batch
from trainer.experience.cursor import Origin
from trainer.reporting.report import MAX_TEXT, pick_rollouts


def batch_of(*rewards, **more):
    made = tuple(make(f"g{at}", tag=at, reward=reward, step=40, **more) for at, reward in enumerate(rewards))
    count = len(made)
    origins = tuple(Origin(f"explorer-{at}", 1, at) for at in range(count))
    return Batch(made, tuple(range(count)), (1.0,) * count, (0,) * count, origins)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, []),
        (1, [1.0]),
        (2, [1.0, 0.0]),
        (3, [1.0, 0.5, 0.0]),
        (5, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (9, [1.0, 0.75, 0.5, 0.25, 0.0]),
    ],
)
def test_sampled_rollouts_are_spread_from_best_to_worst_reward(count, shown):
    assert [each.reward for each in pick_rollouts(batch_of(0.5, 0.0, 1.0, 0.25, 0.75), count)] == shown


def test_a_sampled_rollout_has_its_texts_version_and_explorer():
    (shown,) = pick_rollouts(batch_of(0.5), 4, lambda ids: "+".join(map(str, ids)))
    assert (shown.prompt, shown.response) == ("7+8", "10+11+12")
    assert (shown.generation, shown.step, shown.group, shown.task) == (1, 40, "g0", "task-0")
    assert shown.explorer == "explorer-0"


def test_a_rollout_of_several_segments_is_sampled_once():
    made = (*segmented("a", 0, steps=[1, 2]), make("b", 0, reward=0.0))
    batch = Batch(made, (0, 0, 1), (1.0,) * 3, (0,) * 3, tuple(Origin("e", 1, at) for at in range(3)))
    best, worst = pick_rollouts(batch, 4)
    assert (best.group, worst.group) == ("a", "b")
    assert best.response.split("\n")[0] == best.response.split("\n")[2] == "10 11 12"


def test_without_a_working_tokenizer_token_ids_are_shown():
    def fails(ids):
        raise ValueError("no such id")

    for decode in (None, fails):
        (shown,) = pick_rollouts(batch_of(0.5), 1, decode)
        assert (shown.prompt, shown.response) == ("7 8", "10 11 12")


def test_a_long_text_keeps_its_beginning_and_end():
    (shown,) = pick_rollouts(batch_of(0.5), 1, lambda ids: "a" + "x" * 3 * MAX_TEXT + "z")
    assert len(shown.prompt) < MAX_TEXT + 40
    assert (shown.prompt[0], shown.prompt[-1]) == ("a", "z")


def test_an_sft_batch_has_no_rollouts():
    assert pick_rollouts(Batch((), (), (), (), ()), 4) == []
