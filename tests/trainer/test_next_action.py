"""What comes next, from what is known."""

import pytest
from support.trainers import small_config

from trainer.next_action import (
    Finish,
    LoopFacts,
    Save,
    Sync,
    Validate,
    due_action,
    end_of,
    need_save,
    need_sync,
)


def config(style="fixed", interval=1, save=0, hf="last", total=None):
    return small_config(
        "/job",
        sync={"style": style, "interval": interval},
        trainer={"save_interval": save, "save_hf_checkpoint": hf, "total_steps": total},
    )


@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "fully_async"])
@pytest.mark.parametrize(
    ("step", "synced", "expected"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (2, 2, False), (3, 2, False), (4, 2, True)],
)
def test_a_deciding_trainer_syncs_once_at_each_interval(style, step, synced, expected):
    assert need_sync(config(style, interval=2), LoopFacts(step, synced)) is expected


@pytest.mark.parametrize(
    ("step", "synced", "asks", "expected"),
    [(3, 0, False, False), (3, 0, True, True), (3, 3, True, False), (0, 0, True, False)],
)
def test_deciding_explorers_get_a_sync_only_of_a_step_they_lack(step, synced, asks, expected):
    found = need_sync(config("explorer_driven", interval=2), LoopFacts(step, synced, explorer_asks=asks))
    assert found is expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (LoopFacts(3), False),
        (LoopFacts(4), True),
        (LoopFacts(4, saved=4), False),
        (LoopFacts(4, saved=2, tried=4), False),  # it failed: the next interval tries again
        (LoopFacts(4, saved=2, tried=4, ending="over"), True),
        (LoopFacts(3, ending="over"), True),
        (LoopFacts(4, saved=4, ending="over"), True),  # for its Hugging Face directory
        (LoopFacts(4, saved=4, saved_as_hf=True, ending="over"), False),
        (LoopFacts(4, saved=4, ending="signal", interrupted=True), False),
        (LoopFacts(0, ending="over"), False),
    ],
)
def test_full_checkpoints_are_due_at_each_interval_and_at_the_end(now, expected):
    assert need_save(config(save=2), now) is expected


@pytest.mark.parametrize(
    ("hf", "ending", "interrupted", "expected"),
    [
        ("always", "", False, True),
        ("never", "over", False, False),
        ("last", "", False, False),
        ("last", "over", False, True),
        ("last", "signal 15", True, False),
    ],
)
def test_a_huggingface_directory_is_written_as_save_hf_says(hf, ending, interrupted, expected):
    now = LoopFacts(2, ending=ending, interrupted=interrupted)
    assert due_action(config(save=2, hf=hf), now) == Save(block=bool(ending), as_hf=expected)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (LoopFacts(0), False),
        (LoopFacts(3), False),
        (LoopFacts(4), True),
        (LoopFacts(4, validated=4, synced=4), False),
        (LoopFacts(5, validated=4, ending="over"), True),
        (LoopFacts(5, validated=4, ending="signal 15", interrupted=True), False),
    ],
)
def test_a_validation_comes_at_each_interval_and_at_the_end_before_the_step_is_saved(now, expected):
    file = config(save=1).with_values(data={"validation_path": "x"}, trainer={"validation_interval": 2})
    assert isinstance(due_action(file, now), Validate) is expected
    assert not isinstance(due_action(config(save=1), now), Validate)


def test_one_save_serves_a_sync_and_a_checkpoint_due_together():
    assert due_action(config(save=2), LoopFacts(2, synced=1)) == Save(block=False, as_hf=False)
    assert due_action(config(save=2), LoopFacts(2, synced=2, saved=2)) is None


def test_at_the_end_the_loop_saves_and_then_finishes():
    settings = config(total=3)
    ending = end_of(settings, 3, "")
    assert ending == "total_steps 3 reached"
    assert due_action(settings, LoopFacts(3, synced=2, ending=ending)) == Save(block=True, as_hf=True)
    saved = LoopFacts(3, synced=3, saved=3, saved_as_hf=True, ending=ending)
    assert due_action(settings, saved) == Finish(ending)


def test_a_due_sync_comes_before_the_next_step():
    assert due_action(config(), LoopFacts(1, synced=0)) == Sync()
    assert due_action(config(), LoopFacts(1, synced=1)) is None


def test_an_interrupted_run_asks_to_be_restarted():
    now = LoopFacts(5, synced=5, saved=5, ending="signal 15", interrupted=True)
    assert due_action(config(), now) == Finish("signal 15", again=True)


def test_before_the_first_step_nothing_is_saved():
    assert due_action(config(), LoopFacts(0, ending="signal 15", interrupted=True)) == Finish(
        "signal 15", again=True
    )
