"""Sample strategies: order, staleness, replay, mix; and that a resumed run draws what a straight one does."""

import json
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.experiences import fifo, make, names, segmented, whole_group, write
from support.jobs import ManualClock

from syncd.errors import ConfigError, CorruptDataError, StorageError
from syncd.jobfile.sections import DataSection
from syncd.protocol.layout import Job
from trainer.experience.sft import Example, Examples, read_examples
from trainer.experience.staleness import Staleness
from trainer.experience.strategies import Mix, Replay


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


@pytest.fixture
def clock():
    return ManualClock()


def groups(batch):
    return batch and list(dict.fromkeys(name for _, name, _ in names(batch)))


def test_complete_groups_are_drawn_in_fifo_order_and_incomplete_ones_wait(job, clock):
    strategy = fifo(job, clock, groups=2)
    write(job, "e0", [make("a", 0)], whole_group("b"))
    assert strategy.sample(1, generation=1) is None
    write(job, "e0", whole_group("c"), [make("a", 1)])
    batch = strategy.sample(1, generation=1)
    assert names(batch) == [("e0", "a", 0), ("e0", "a", 1), ("e0", "b", 0), ("e0", "b", 1)]
    assert batch.groups == (0, 0, 1, 1)
    assert strategy.metrics()["experience/waiting"] == 2
    assert strategy.sample(2, generation=1) is None


def test_equal_group_ids_of_two_explorers_are_different_groups(job, clock):
    strategy = fifo(job, clock, groups=1)
    write(job, "e0", [make("a", 0)])
    write(job, "e1", [make("a", 1)])
    assert strategy.sample(1, generation=1) is None


def test_a_duplicate_rollout_is_dropped(job, clock):
    strategy = fifo(job, clock, groups=1)
    write(job, "e0", [make("a", 0, tag=1), make("a", 0, tag=2), make("a", 1), make("a", 2)])
    assert [e.task for e in strategy.sample(1, generation=1).experiences] == ["task-1", "task-0"]
    assert strategy.metrics()["experience/dropped_duplicate"] == 2


def test_an_incomplete_group_times_out_also_across_a_restart(job, clock):
    strategy = fifo(job, clock, groups=1, group_timeout=100)
    write(job, "e0", [make("a", 0)])
    assert strategy.sample(1, generation=1) is None
    clock.at += 60
    again = fifo(job, clock, groups=1, group_timeout=100)
    again.load_state_dict(json.loads(json.dumps(strategy.state_dict())))
    clock.at += 60
    assert again.sample(1, generation=1) is None
    assert again.metrics()["experience/dropped_incomplete"] == 1
    assert again.metrics()["experience/waiting_incomplete"] == 0


def test_incomplete_groups_do_not_crowd_out_complete_ones(job, clock):
    strategy = fifo(job, clock, groups=1, max_waiting=3)
    write(job, "e0", *[[make(f"half-{number}", 0)] for number in range(9)], whole_group("a"))
    assert groups(strategy.sample(1, generation=1)) == ["a"]
    assert strategy.metrics()["experience/dropped_crowded"] == 6


def test_no_more_rollouts_are_read_than_may_wait(job, clock):
    strategy = fifo(job, clock, groups=1, max_waiting=4)
    write(job, "e0", *[whole_group(name) for name in "abcdef"])
    assert groups(strategy.sample(1, generation=1)) == ["a"]
    assert strategy.metrics()["experience/waiting"] == 2
    assert strategy.metrics()["experience/waiting_batches"] == 4
    assert [groups(strategy.sample(1, generation=1)) for _ in range(6)] == [
        ["b"],
        ["c"],
        ["d"],
        ["e"],
        ["f"],
        None,
    ]


def test_groups_beyond_the_staleness_bound_are_dropped_whole(job, clock):
    strategy = fifo(job, clock, groups=1, staleness=Staleness(bound=2, interval=2))
    write(job, "e0", whole_group("old", step=3), [make("b", 0, step=4), make("b", 1, step=9)])
    batch = strategy.sample(9, generation=1)
    assert groups(batch) == ["b"]
    assert batch.ages == (2, 0)
    assert batch.weights == (1.0, 1.0)
    metrics = strategy.metrics()
    assert metrics["experience/dropped_stale"] == 2
    assert (metrics["experience/age_mean"], metrics["experience/age_max"]) == (1.0, 2.0)


@pytest.mark.parametrize("other", [{"generation": 3}, {"generation": 3, "step": 1}, {"step": 6}])
def test_rollouts_ahead_of_the_trainer_are_stale(job, clock, other):
    strategy = fifo(job, clock, groups=1, staleness=Staleness(bound=100))
    write(
        job,
        "e0",
        whole_group("other", **{"step": 5, "generation": 2, **other}),
        whole_group("a", step=5, generation=2),
    )
    assert groups(strategy.sample(5, generation=2)) == ["a"]


def test_the_oldest_token_decides_the_staleness_of_a_rollout(job, clock):
    strategy = fifo(job, clock, groups=1, size=1, staleness=Staleness(bound=2))
    write(
        job, "e0", [make("a", step=5, spans=[(0, 1, 5), (1, 1, 9)])], [make("b", step=8, spans=[(0, 1, 9)])]
    )
    assert groups(strategy.sample(9, generation=1)) == ["b"]


VERSIONS = [
    # now, made by, interval, age
    ((2, 5), (2, 5), 1, 0),
    ((2, 5), (2, 3), 1, 2),
    ((2, 5), (2, 6), 1, None),
    ((2, 5), (3, 1), 1, None),
    ((2, 5), (1, 5), 1, 1),
    ((2, 5), (1, 3), 1, 3),
    ((2, 5), (1, 9), 1, 5),
    ((4, 5), (1, 9), 1, 7),
    ((2, 40), (1, 60), 10, 3),
    ((2, 40), (1, 40), 10, 1),
]


@pytest.mark.parametrize(("now", "made_by", "interval", "age"), VERSIONS)
def test_age_is_computed_from_generation_and_step(now, made_by, interval, age):
    """After a rewind a higher step of an earlier generation is old, not from the future."""
    generation, step = made_by
    found = Staleness(interval=interval).age(make(generation=generation, step=step), now)
    assert found == age


def test_tokens_from_before_a_rewind_make_a_rollout_stale(job, clock):
    """Its newest tokens are of the trainer's own version, its first ones of a step that was abandoned."""
    across = make("across", generation=1, step=9, spans=[(0, 1, 9), (2, 2, 5)])
    strategy = fifo(job, clock, groups=1, size=1, staleness=Staleness(bound=4))
    write(job, "e0", [across], [make("a", generation=2, step=5)])
    assert groups(strategy.sample(5, generation=2)) == ["a"]
    assert strategy.metrics()["experience/dropped_stale"] == 1
    assert Staleness().age(across, (2, 5)) == 5


def test_a_rollout_is_as_old_as_its_oldest_segment(job, clock):
    staleness = Staleness(bound=1, beyond="weight", decay=0.5)
    strategy = fifo(job, clock, groups=1, size=2, staleness=staleness)
    write(job, "e0", [*segmented("a", 0, steps=[9, 6, 8]), make("a", 1, step=9)])
    batch = strategy.sample(9, generation=1)
    assert batch.ages == (3, 3, 3, 0)
    assert batch.weights == (0.25, 0.25, 0.25, 1.0)
    assert strategy.metrics()["experience/age_mean"] == 1.5


def test_segments_of_a_rollout_are_one_member_of_their_group(job, clock):
    strategy = fifo(job, clock, groups=1, size=2, max_waiting=2)
    write(job, "e0", segmented("a", 0, steps=[1, 1, 1]), segmented("a", 0, steps=[1]), [make("a", 1)])
    batch = strategy.sample(1, generation=1)
    assert [(one.rollout, one.segment) for one in batch.experiences] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [origin.row for origin in batch.origins] == [0, 1, 2, 0]
    assert (batch.rollouts, batch.groups) == ((0, 0, 0, 1), (0, 0, 0, 0))
    assert [one.rollout for one in batch.firsts] == [0, 1]
    assert strategy.metrics()["experience/dropped_duplicate"] == 1


def test_a_waiting_segmented_rollout_survives_a_restart(job, clock):
    strategy = fifo(job, clock, groups=1, size=2)
    write(job, "e0", [make("z", 0), *segmented("a", 0, steps=[1, 1, 1])])
    assert strategy.sample(1, generation=1) is None
    assert strategy.metrics()["experience/waiting_incomplete"] == 2
    state = json.loads(json.dumps(strategy.state_dict()))
    again = fifo(job, clock, groups=1, size=2)
    again.load_state_dict(state)
    write(job, "e0", [make("a", 1)])
    drawn = [one.sample(1, generation=1) for one in (strategy, again)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0].experiences) == 4
    state["waiting"][1]["members"].pop()
    part = fifo(job, clock, groups=1, size=2)
    part.load_state_dict(state)
    assert part.metrics()["experience/waiting_incomplete"] == 1


def test_examples_are_a_share_of_rollouts_not_of_segments(job, clock):
    write(job, "e0", [*segmented("a", 0, steps=[1] * 7), make("a", 1)])
    strategy = Mix(fifo(job, clock, groups=1), Examples(_examples(), seed=1), ratio=0.5)
    assert len(strategy.sample(1, generation=1).examples) == 2


def test_unproven_tokens_are_counted(job, clock):
    write(job, "e0", [make("a", unproven=[True, False, True]), make("a", 1)])
    strategy = fifo(job, clock, groups=1)
    batch = strategy.sample(1, generation=1)
    assert [list(one.learnt) for one in batch.experiences] == [[0, 1, 0], [1, 1, 1]]
    assert strategy.metrics()["experience/unproven_tokens"] == 2


def test_stale_rollouts_can_be_weighted_down(job, clock):
    staleness = Staleness(bound=1, beyond="weight", decay=0.5)
    strategy = fifo(job, clock, groups=3, size=1, staleness=staleness)
    write(job, "e0", [make("a", step=3), make("b", step=2), make("c", step=1), make("gone", generation=0)])
    assert strategy.sample(4, generation=1).weights == (1.0, 0.5, 0.25)


def test_without_a_staleness_bound_every_rollout_is_drawn(job, clock):
    strategy = fifo(job, clock, groups=1, size=1)
    write(job, "e0", [make("a", generation=2, step=1)], [make("b", generation=0, step=50)])
    batches = [strategy.sample(4, generation=1) for _ in range(2)]
    assert [(batch.ages, batch.weights) for batch in batches] == [((None,), (1.0,)), ((47,), (1.0,))]


def test_replay_draws_a_share_of_used_groups_and_keeps_their_batches(job, clock):
    write(job, "e0", *[whole_group(str(number)) for number in range(12)])
    strategy = Replay(fifo(job, clock, groups=2), capacity=3, share=0.5, seed=4)
    assert groups(strategy.sample(1, generation=1)) == ["0", "1"]
    for number in range(2, 10):
        fresh, old = groups(strategy.sample(number, generation=1))
        assert fresh == str(number)
        assert number - 4 < int(old) < number
    assert strategy.metrics()["experience/replay_groups"] == 3
    assert strategy.commit(strategy.state_dict()) == 7
    again = Replay(fifo(job, clock, groups=2), capacity=3, share=0.5, seed=4)
    again.load_state_dict(json.loads(json.dumps(strategy.state_dict())))
    assert [names(again.sample(n, generation=1)) for n in (10, 11)] == [
        names(strategy.sample(n, generation=1)) for n in (10, 11)
    ]


def test_replay_drops_stale_groups(job, clock):
    write(job, "e0", whole_group("a", step=1))
    strategy = Replay(fifo(job, clock, groups=1, staleness=Staleness(bound=1)), capacity=3, share=0.9)
    assert groups(strategy.sample(1, generation=1)) == ["a"]
    write(job, "e0", whole_group("b", step=9))
    assert groups(strategy.sample(9, generation=1)) == ["b"]
    assert strategy.metrics()["experience/replay_groups"] == 1


def _examples(count=5):
    return [Example([1, 2, 3 + number], 1) for number in range(count)]


def test_a_mix_keeps_its_ratio_and_its_own_cursor(job, clock):
    write(job, "e0", *[whole_group(str(number)) for number in range(6)])
    strategy = Mix(fifo(job, clock, groups=1), Examples(_examples(), seed=1), ratio=0.6)
    batches = [strategy.sample(step, generation=1) for step in range(5)]
    assert [len(batch.examples) for batch in batches] == [3] * 5
    drawn = [example.tokens[2] for batch in batches for example in batch.examples]
    assert [sorted(drawn[start : start + 5]) for start in (0, 5, 10)] == [[3, 4, 5, 6, 7]] * 3
    assert len({tuple(drawn[start : start + 5]) for start in (0, 5, 10)}) > 1
    assert strategy.sample(6, generation=1) is not None
    assert strategy.sample(7, generation=1) is None
    assert strategy.commit(strategy.state_dict()) == 6


def test_a_state_of_a_changed_data_set_is_refused():
    state = Examples(_examples()).state_dict()
    with pytest.raises(ConfigError, match="changed"):
        Examples(_examples(4)).load_state_dict(state)


def test_data_sets_are_read_from_jsonl_and_parquet(tmp_path):
    rows = [{"tokens": [1, 2, 3], "prompt_length": 1}, {"tokens": [4, 5], "prompt_length": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = read_examples(str(tmp_path / "a.jsonl"))
    assert [list(example.tokens) for example in read] == [[1, 2, 3], [4, 5]]
    assert read_examples(str(tmp_path / "a.parquet")) == read
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n')
    read = read_examples(str(tmp_path / "b.jsonl"), lambda row: ([ord(letter) for letter in row["text"]], 1))
    assert list(read[0].tokens) == [97, 98]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]\n",
        '{"tokens": [1]}\n',
        '{"tokens": [1, 2], "prompt_length": 2}\n',
        '{"tokens": [1, -2], "prompt_length": 1}\n',
        '{"tokens": 5, "prompt_length": 1}\n',
    ],
)
def test_an_invalid_data_set_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_examples(str(path))
    assert caught.value.path == str(path)
    (tmp_path / "a.parquet").write_text("no Parquet")
    with pytest.raises(ConfigError):
        read_examples(str(tmp_path / "a.parquet"))
    with pytest.raises(StorageError):
        read_examples(str(tmp_path / "missing.jsonl"))


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": [1, 2], "prompt_length": 1}\n\n{"tokens": [1, 2], "prompt_length": }\n')
    with pytest.raises(ConfigError, match=r"line 3, column \d+: Expecting value"):
        read_examples(str(path))


def test_invalid_strategy_settings_are_refused(job, clock):
    for wrong in ({"groups": 0}, {"size": 0}, {"group_timeout": 0}, {"max_waiting": 1}):
        with pytest.raises((ConfigError, ValidationError)):
            fifo(job, clock, **wrong)
    for wrong in ({"bound": -1}, {"interval": 0}, {"decay": 1.0}):
        with pytest.raises(ConfigError):
            Staleness(**wrong)
    with pytest.raises(ConfigError):
        Replay(fifo(job, clock), capacity=0, share=0.5)
    with pytest.raises(ConfigError):
        Mix(fifo(job, clock), Examples(_examples()), ratio=1.0)


def test_a_damaged_state_or_one_of_another_strategy_is_refused(job, clock):
    strategy = fifo(job, clock)
    state = strategy.state_dict()
    for wrong in (
        {},
        {**state, "kind": "replay"},
        {**state, "cursor": 5},
        {**state, "waiting": [{"explorer": "e0", "group": "g", "waited": 0, "members": [[1]]}]},
    ):
        with pytest.raises(CorruptDataError):
            fifo(job, clock).load_state_dict(wrong)


KINDS = {
    "fifo": lambda job, clock: fifo(job, clock, groups=2, max_waiting=4, staleness=Staleness(bound=6)),
    "weight": lambda job, clock: fifo(job, clock, groups=1, staleness=Staleness(bound=1, beyond="weight")),
    "replay": lambda job, clock: Replay(
        fifo(job, clock, groups=3, max_waiting=6), capacity=4, share=0.4, seed=3
    ),
    "mix": lambda job, clock: Mix(fifo(job, clock, groups=1), Examples(_examples(), seed=2), ratio=0.4),
}

BATCHES = st.tuples(
    st.sampled_from(["e0", "e1", "e2"]),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1), st.integers(0, 9)), min_size=1, max_size=6),
)
SCHEDULES = st.lists(
    st.one_of(BATCHES, st.just("sample"), st.just("torn"), st.just("time")), min_size=4, max_size=40
)


def _run(kind, schedule, restarts, *, commit):
    """Return what each sample of a schedule draws, with a restart from the saved state before some of its events."""
    drawn, clock = [], ManualClock()
    with tempfile.TemporaryDirectory() as place:
        job = Job.at(place)
        strategy = KINDS[kind](job, clock)
        for number, event in enumerate(schedule):
            if number in restarts:
                state = json.dumps(strategy.state_dict())
                if commit:
                    strategy.commit(json.loads(state))
                strategy = KINDS[kind](job, clock)
                strategy.load_state_dict(json.loads(state))
            if event == "sample":
                drawn.append(strategy.sample(number, generation=1))
            elif event == "time":
                clock.at += 200
            elif event == "torn":
                (path,) = write(job, "e1", [make()])
                with open(path, "r+b") as file:
                    file.truncate(40)
            else:
                rollouts = [
                    segmented(f"g{group}", rollout, steps=[step] * (1 + step % 3), tag=number)
                    for group, rollout, step in event[1]
                ]
                write(job, event[0], [segment for rollout in rollouts for segment in rollout])
        return drawn


@pytest.mark.parametrize("kind", KINDS)
@given(schedule=SCHEDULES, restarts=st.sets(st.integers(0, 39), min_size=1), commit=st.booleans())
@settings(max_examples=12)
def test_a_run_with_restarts_draws_the_same_samples_as_one_without(kind, schedule, restarts, commit):
    assert _run(kind, schedule, restarts, commit=commit) == _run(kind, schedule, set(), commit=False)


def test_a_restart_continues_with_the_next_explorer(job, clock):
    for explorer in ("e0", "e1", "e2"):
        write(job, explorer, *[whole_group(name) for name in "abc"])
    drawn, state = [], None
    for step in range(9):
        strategy = fifo(job, clock, groups=1, max_waiting=2)
        if state is not None:
            strategy.load_state_dict(json.loads(state))
        drawn.append(names(strategy.sample(step, generation=1))[0][:2])
        state = json.dumps(strategy.state_dict())
    assert drawn == [(explorer, name) for name in "abc" for explorer in ("e0", "e1", "e2")]


def test_the_default_max_waiting_holds_a_whole_draw():
    assert DataSection(group_size=8, groups=16).max_waiting >= 128
