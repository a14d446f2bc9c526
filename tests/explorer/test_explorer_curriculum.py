"""Tasks by difficulty: the rule, its floor, and that it goes on after a restart where it was."""

from collections import Counter

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")


from explorer_hooks.run.curriculum import Curriculum, are_equal
from explorer_hooks.run.own_files import Records
from syncd.jobfile.explorer_sections import CurriculumSection


@pytest.fixture
def opened(tmp_path):
    def one(**keys):
        return Curriculum(
            CurriculumSection(enabled=True, **keys), Records(str(tmp_path / "difficulty.jsonl")), "0/e0"
        )

    return one


def test_a_task_is_most_probable_where_half_of_its_rewards_were_had(opened):
    curriculum = opened(floor=0.1)
    assert curriculum.probability("new") == 1.0
    curriculum.measured([("never", 0.0), ("always", 1.0), ("half", 0.5), ("rarely", 0.25), ("beyond", 3.0)])
    found = [curriculum.probability(name) for name in ("never", "always", "half", "rarely", "beyond")]
    assert found == [0.1, 0.1, 1.0, 4 * 0.25 * 0.75, 0.1]
    # The newest measurement counts as much as all before it.
    curriculum.measured([("always", 0.5)])
    assert curriculum.probability("always") == 4 * 0.75 * 0.25
    # A task may have two groups in a batch.
    curriculum.measured([("twice", 1.0), ("twice", 0.0)])
    assert curriculum.probability("twice") == 1.0


def test_rewards_of_another_scale_are_mapped_to_it(opened):
    curriculum = opened(lowest=-2.0, highest=2.0)
    curriculum.measured([("worst", -2.0), ("middle", 0.0)])
    assert [curriculum.probability(name) for name in ("worst", "middle")] == [0.05, 1.0]


def test_a_restart_knows_what_was_measured_and_decides_alike(opened, tmp_path):
    curriculum = opened()
    curriculum.measured([("a", 1.0), ("b", 0.1)])
    curriculum.measured([("a", 0.75)])
    with open(tmp_path / "difficulty.jsonl", "ab") as file:
        file.write(b'{"rewards": {"b": ')  # of a process that was killed
    places = [(epoch, at, name) for epoch in range(20) for at, name in enumerate("abc")]
    before = [curriculum.takes(*place) for place in places]
    assert [opened().takes(*place) for place in places] == before
    assert {True, False} == set(before)


def test_no_task_starves_and_the_shares_are_those_of_the_rule(opened):
    curriculum = opened(floor=0.05)
    curriculum.measured([("solved", 1.0), ("hard", 0.1)])
    taken = Counter(
        name
        for epoch in range(4000)
        for at, name in enumerate(("solved", "hard"))
        if curriculum.takes(epoch, at, name)
    )
    assert taken["solved"] == pytest.approx(4000 * 0.05, rel=0.2)
    assert taken["hard"] == pytest.approx(4000 * 0.36, rel=0.1)


def test_without_it_every_task_is_taken_and_nothing_is_recorded(tmp_path):
    path = tmp_path / "difficulty.jsonl"
    curriculum = Curriculum(CurriculumSection(), Records(str(path)), "s")
    curriculum.measured([("a", 1.0)])
    assert all(curriculum.takes(epoch, 0, "a") for epoch in range(50))
    assert not path.exists()


def test_groups_are_equal_only_if_all_rewards_are():
    assert are_equal([0.5, 0.5, 0.5])
    assert not are_equal([0.5, 0.5, 0.25])
