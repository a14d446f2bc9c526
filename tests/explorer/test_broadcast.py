"""Broadcasts between real processes: the trainer's loop, explorers, a daemon; gloo on this host."""

import pytest
from broadcasts import ENVIRONMENT, Processes, left_over
from nursery import Nursery

STEPS = 5


@pytest.fixture(scope="module")
def nursery():
    made = Nursery(ENVIRONMENT)
    yield made
    made.close()


@pytest.fixture
def processes(tmp_path, nursery):
    made = Processes(tmp_path / "job", nursery)
    yield made
    made.shut()


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven", "fully_async"])
def test_all_end_by_themselves_on_the_same_weights(processes, style, members):
    names = [f"e{number}" for number in range(members)]
    processes.daemon()
    for name in names:
        processes.explorer(name, style, STEPS)
    processes.trainer(style, STEPS, members)
    for name in ("trainer", *names):
        processes.ended(name)
    trained = processes.result("trainer")
    for name in names:
        found = processes.result(name)
        assert found["digest"] == trained["digest"]
        assert found["applied"] == [1, STEPS]
        assert [way for _, way in found["ways"]].count("broadcast") >= 1
    assert [step for step, _ in trained["ends"]] != []
    assert left_over(processes.job) == []
