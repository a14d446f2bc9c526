"""Batches as arrays: padded and jagged say the same."""

import numpy as np
from support.experiences import fifo, make, segmented, write
from support.jobs import ManualClock

from syncd.protocol.layout import Job
from trainer.experience.arrays import jagged, padded, padded_examples
from trainer.experience.batch import Batch
from trainer.experience.sft import Example


def _batch(tmp_path):
    job = Job.at(tmp_path)
    write(
        job, "e0", [make("a", 0, length=2, reward=1.0), make("a", 1, length=4)], [make("b", 0), make("b", 1)]
    )
    return fifo(job, ManualClock()).sample(1, generation=1)


def test_padded_arrays_are_aligned_with_the_tokens(tmp_path):
    arrays = padded(_batch(tmp_path), pad=99)
    assert arrays["input_ids"].tolist()[:2] == [[7, 8, 10, 11, 99, 99], [7, 8, 10, 11, 12, 13]]
    assert arrays["attention_mask"].sum(1).tolist() == [4, 6, 5, 5]
    assert arrays["response_mask"].tolist()[0] == [False, False, True, True, False, False]
    assert np.allclose(arrays["logprobs"][0], [0, 0, -0.1, -0.2, 0, 0])
    assert arrays["group"].tolist() == [0, 0, 1, 1]
    assert arrays["reward"].tolist() == [1.0, 0.5, 0.5, 0.5]
    assert arrays["weight"].tolist() == [1.0] * 4
    assert arrays["age"].tolist() == [1] * 4
    assert [arrays[name].dtype for name in ("input_ids", "logprobs", "response_mask")] == [
        np.int32,
        np.float32,
        bool,
    ]


def test_jagged_rows_equal_padded_rows_without_padding(tmp_path):
    batch = _batch(tmp_path)
    square, flat = padded(batch), jagged(batch)
    offsets, responses = flat["offsets"], flat["response_offsets"]
    for row, prompt in enumerate(flat["prompt_length"]):
        length = offsets[row + 1] - offsets[row]
        assert (
            flat["tokens"][offsets[row] : offsets[row + 1]].tolist()
            == square["input_ids"][row][:length].tolist()
        )
        for name in ("logprobs", "response_mask"):
            piece = flat[name][responses[row] : responses[row + 1]]
            assert piece.tolist() == square[name][row][prompt:length].tolist()


def test_optional_rollout_fields_are_kept_in_arrays(tmp_path):
    job = Job.at(tmp_path)
    told = make(
        "a", 0, reward=0.75, unproven=[False, True, False], teacher_logprobs=[-0.5, -1.0, -1.5],
        turn_rewards=[(1, 0.25), (3, 0.5)],
    )  # fmt: skip
    write(job, "e0", [told, *segmented("a", 1, steps=[0, 0])])
    batch = fifo(job, ManualClock(), groups=1).sample(1, generation=1)
    square, flat = padded(batch), jagged(batch)
    assert square["response_mask"].tolist()[:2] == [[0, 0, 1, 0, 1], [0, 0, 1, 1, 1]]
    assert square["teacher_logprobs"].tolist()[:2] == [[0, 0, -0.5, -1.0, -1.5], [0] * 5]
    assert square["turn_rewards"].tolist()[:2] == [[0, 0, 0.25, 0, 0.5], [0] * 5]
    assert square["has_teacher"].tolist() == square["has_turns"].tolist() == [True, False, False]
    assert square["rollout"].tolist() == [0, 1, 1]
    assert flat["teacher_logprobs"].tolist()[:3] == [-0.5, -1.0, -1.5]
    assert flat["turn_rewards"].tolist()[:3] == [0.25, 0, 0.5]


def test_the_loss_mask_of_examples_covers_their_responses():
    arrays = padded_examples([Example([1, 2, 3], 2), Example([4, 5], 1)])
    assert arrays["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert arrays["loss_mask"].tolist() == [[False, False, True], [False, True, False]]


def test_an_empty_batch_gives_empty_arrays():
    nothing = Batch((), (), (), (), ())
    assert padded(nothing)["input_ids"].shape == (0, 0)
    assert jagged(nothing)["offsets"].tolist() == [0]
    assert padded_examples(())["loss_mask"].shape == (0, 0)
