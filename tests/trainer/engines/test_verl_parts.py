"""What of verl's engine needs no verl: rows and who takes them, figures over ranks, names, companions."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support import samples  # noqa: E402

from syncd.errors import ConfigError, CorruptDataError, UsageError  # noqa: E402
from syncd.jobfile.trainer_sections import AlgorithmSection  # noqa: E402
from trainer.config.algorithms import ALGORITHMS  # noqa: E402
from trainer.config.model_files import companions, read_model_config  # noqa: E402
from trainer.config.schedule import schedule_steps  # noqa: E402
from trainer.engines.verl import figures, rows  # noqa: E402
from trainer.engines.verl.checks import resolve  # noqa: E402
from trainer.engines.verl.figures import StepMetrics  # noqa: E402
from trainer.engines.verl.pass_times import PassTimes  # noqa: E402
from trainer.engines.verl.rows import prepare_step  # noqa: E402

pytestmark = pytest.mark.group("engines")


def row_of(length, learnt=True):
    mask = torch.full((length - 1,), int(learnt))
    return rows.TokenRow(torch.arange(length), 1, mask)


lengths = st.lists(st.integers(2, 30), min_size=1, max_size=40)


@given(lengths, st.integers(1, 5), st.integers(1, 9))
def test_ranks_get_each_row_once_and_equally_many(sizes, ranks, most):
    found = [row_of(size) for size in sizes]
    shares = [rows.deal(found, range(len(found)), rank, ranks) for rank in range(ranks)]
    assert sorted(slot for share in shares for slot in share if slot is not None) == list(range(len(found)))
    assert len({len(share) for share in shares}) == 1
    for share in shares:
        filled, size = rows.fill(share, most)
        assert filled[: len(share)] == share
        assert 1 <= size <= most
        assert len(filled) % size == 0
        assert len(filled) - len(share) < -(-len(share) // most)  # at most one row of padding a micro-batch


@given(lengths)
def test_ranks_get_about_equally_many_tokens(sizes):
    found = [row_of(size) for size in sizes]
    tokens = [
        sum(sizes[slot] for slot in rows.deal(found, range(len(found)), rank, 2) if slot is not None)
        for rank in range(2)
    ]
    assert abs(tokens[0] - tokens[1]) <= max(sizes)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5))
def test_updates_of_a_pass_have_every_row_once_and_are_never_empty(rollouts, examples, parts):
    found = rows.split_updates([row_of(5)] * rollouts, [row_of(5)] * examples, parts)
    assert [number for part in found for number in part.rollouts] == list(range(rollouts))
    assert [number for part in found for number in part.examples] == list(range(examples))
    assert all(part.rollouts or part.examples for part in found)
    assert len(found) == min(parts, max(rollouts, examples))


def test_a_part_without_learnt_tokens_is_no_update():
    found = rows.split_updates(
        [row_of(5, learnt=False), row_of(5, learnt=False), row_of(5), row_of(5)], [], 2
    )
    assert found == [rows.UpdateRows([2, 3], [])]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 5))
def test_all_segments_of_a_rollout_are_in_one_update(sizes, parts):
    found = [replace(row_of(5), rollout=number) for number, size in enumerate(sizes) for _ in range(size)]
    updates = rows.split_updates(found, [], parts)
    assert [number for part in updates for number in part.rollouts] == list(range(len(found)))
    assert len(updates) == min(parts, len(sizes))
    sets = [{found[number].rollout for number in part.rollouts} for part in updates]
    assert sum(map(len, sets)) == len(set.union(*sets)) == len(sizes)
    counts = [rows.count_samples(found, part.rollouts) for part in updates]
    assert counts == [len(its) for its in sets]
    assert rows.count_samples([row_of(5), row_of(5), row_of(5, learnt=False)], range(3)) == 2


def test_unproven_tokens_are_masked_and_the_horizon_counts_whole_rollouts():
    batch = samples.segmented_batch(1)
    step = prepare_step(resolve(AlgorithmSection()), batch, mixed=False)
    for row, one in zip(step.rollouts, batch.experiences, strict=True):
        doubted = one.unproven or bytes(len(one.logprobs))
        assert row.mask.tolist() == [int(a and not b) for a, b in zip(one.action_mask, doubted, strict=True)]
    assert [row.rollout for row in step.rollouts] == [0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5]
    assert step.horizon == max(sum(len(r.mask) for r in step.rollouts if r.rollout == n) for n in range(6))


def test_the_response_slice_starts_one_position_before_its_first_token():
    row = rows.TokenRow(torch.arange(6), 2, torch.ones(4))
    assert row.response(torch.arange(10, 16)).tolist() == [11, 12, 13, 14]


def test_tokens_outside_the_vocabulary_are_refused():
    rows.check_vocabulary([row_of(5)], 5)
    with pytest.raises(CorruptDataError, match="token 4 in a batch for a model of 4 tokens"):
        rows.check_vocabulary([row_of(5)], 4)


def test_prepared_rows_match_the_samples_of_the_batch():
    step = prepare_step(resolve(AlgorithmSection()), samples.batch_of(1, examples=2), mixed=False)
    assert (len(step.rollouts), len(step.examples), len(step.rows)) == (10, 2, 12)
    assert step.rollouts[2].mask.tolist() == [int(x) for x in samples.batch_of(1).experiences[2].action_mask]
    assert step.horizon == max(len(row.mask) for row in step.rollouts)
    assert all(row.mask.all() for row in step.examples)
    with pytest.raises(UsageError, match="nothing to learn"):
        prepare_step(AlgorithmSection(name="sft"), samples.batch_of(1), mixed=False)


class Pair:
    """Two ranks of which the other one has found something else."""

    rank, world_size = 0, 2

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_step_metrics_are_weighted_over_all_ranks():
    one, other = StepMetrics(sums={"unseen": 0.0}), StepMetrics(tops={"unseen top": 0.0})
    one.add("sum", 1.0)
    other.add("sum", 2.0)
    one.mean("mean", 1.0, 30)
    other.mean("mean", 3.0, 10)
    other.mean("mean", 0.0, 0)
    one.top("top", -2.0)
    other.top("top", -1.0)
    assert one.over(Pair(other)) == {"unseen": 0, "sum": 3, "mean": 1.5, "top": -1, "unseen top": 0}


def test_response_lengths_have_tool_tokens_which_are_counted_separately_too():
    batch = samples.batch_of(1, sizes=(3, 3))
    chosen = [sum(row.action_mask) for row in batch.experiences]
    others = [sum(not chose for chose in row.action_mask) for row in batch.experiences]
    assert sum(others) == 4, "two rows have a tool's token at each end"
    found = figures.batch_metrics(batch)
    assert found["response_length/mean"] == pytest.approx((sum(chosen) + 4) / 6)
    assert found["response/tokens"] == sum(chosen)
    assert found["response/tool_tokens_mean"] == pytest.approx(4 / 6)
    step = prepare_step(resolve(AlgorithmSection()), batch, mixed=False)
    assert found["response/tokens"] == sum(int(row.mask.sum()) for row in step.rows), "as train/tokens"
    nothing = figures.batch_metrics(samples.batch_of(1, sizes=()))
    assert nothing["response_length/mean"] == nothing["response/tool_tokens_mean"] == 0


def test_figures_of_rewards_count_rollouts_and_groups_once():
    """Two groups, of which one is flat; parts and truncation are of the rollouts that say them."""
    infos = [
        {
            "truncated": False,
            "score": {"format": 1, "hint": "text", "close": True},
            "tools": {"add": [2, 3.0]},
        },
        {"truncated": True, "score": {"format": 0.5}, "tools": {"add": [9, 9.0]}},
        {"score": [1], "tools": {"add": [1, 1.5], "find": [1, 0.25], "odd": [0, 1], "no": "time"}},
        {"tools": 7},
    ]
    rows = [
        samples.row_of([1, 1], reward=0.5, group="g", rollout=0, segment=0, segments=2),
        samples.row_of([1], reward=0.5, group="g", rollout=0, segment=1, segments=2),
        samples.row_of([1], reward=0.5, group="g", rollout=1),
        samples.row_of([1], reward=1.0, group="g", rollout=0),
    ]
    told = [replace(row, info=info) for row, info in zip(rows, infos, strict=True)]
    batch = replace(samples.batch_of_rows(told), groups=(0, 0, 0, 1))
    found = figures.batch_metrics(batch)
    assert found["critic/score/mean"] == pytest.approx(2 / 3)
    assert found["reward/equal_groups"] == 1.0
    assert (found["reward/parts/format"], found["reward/parts/close"]) == (1.0, 1.0)
    assert found["response/truncated"] == 1.0, "of the one rollout whose last segment says it"
    assert {name for name in found if name.startswith("reward/parts/")} == {
        "reward/parts/format",
        "reward/parts/close",
    }
    assert {name: value for name, value in found.items() if name.startswith("tools/")} == {
        "tools/add/seconds": 1.5,
        "tools/add/calls": 1.0,
        "tools/find/seconds": 0.25,
        "tools/find/calls": pytest.approx(1 / 3),
    }
    mixed = figures.batch_metrics(samples.batch_of(1, sizes=(2, 2)))
    assert mixed["reward/equal_groups"] == 0.5
    assert "response/truncated" not in mixed
    assert "reward/equal_groups_dropped" not in mixed
    said = zip(
        batch.experiences,
        ({"equal_dropped": 2.5}, {}, {"equal_dropped": "x"}, {"equal_dropped": 0.5}),
        strict=True,
    )
    dropped = replace(batch, experiences=tuple(replace(row, info=info) for row, info in said))
    assert figures.batch_metrics(dropped)["reward/equal_groups_dropped"] == 3 / (3 + 2)
    assert figures.batch_metrics(samples.batch_of(1, sizes=()))["reward/equal_groups"] == 0.0


def test_numbers_that_no_float_is_count_as_unsaid():
    vast = {
        "equal_dropped": 10**400,
        "score": {"a": -(10**400)},
        "tools": {"b": [1, 10**400], "c": [10**400, 1]},
    }
    batch = samples.batch_of(1)
    told = replace(batch, experiences=tuple(replace(row, info=vast) for row in batch.experiences))
    assert figures.batch_metrics(told) == figures.batch_metrics(batch)


def test_passes_of_micro_batches_are_measured_apart():
    times, model = PassTimes("cpu", "timing_s/critic_"), torch.nn.Linear(2, 1)
    for _ in range(2):
        times.start()
        with times.measure("values"):
            model(torch.ones(1, 2))
        with times.passes(model, torch.nn.functional.mse_loss) as loss:
            for _ in range(3):
                loss(model(torch.ones(1, 2)), torch.zeros(1, 1)).backward()
        model(torch.ones(1, 2))
    names = [name for name, _ in times._marks]
    assert names == ["values", "", *["forward", "backward"] * 3, ""], "the second step, and no hook is left"
    marks = [at for _, at in times._marks]
    found = times.seconds()
    assert found.keys() == {"timing_s/critic_values", "timing_s/critic_forward", "timing_s/critic_backward"}
    assert sum(found.values()) == pytest.approx(marks[-1] - marks[2] + marks[1] - marks[0])
    with PassTimes("cpu").passes([model], model) as untimed:
        assert untimed is model, "the stages of a pipeline have no such order"


def test_teacher_figures_are_means_over_the_learnt_tokens_that_the_teacher_has_read():
    batch = samples.segmented_batch(3)
    assert not [name for name in figures.batch_metrics(batch) if name.startswith("teacher/")]
    taught = samples.taught(batch, every=2)
    apart = [
        own - teacher
        for row in taught.experiences[::2]
        for own, teacher, learnt in zip(row.logprobs, row.teacher_logprobs, row.learnt, strict=True)
        if learnt
    ]
    found = figures.batch_metrics(taught)
    assert found["teacher/tokens"] == len(apart)
    assert found["teacher/reverse_kl"] == pytest.approx(sum(apart) / len(apart))
    assert found["teacher/logprob_diff_mean"] == pytest.approx(sum(map(abs, apart)) / len(apart))


def test_an_algorithm_name_sets_what_the_configuration_leaves_open():
    found = resolve(AlgorithmSection(name="gspo"))
    assert (found.advantage, found.loss) == ("grpo", "gspo")
    own = resolve(AlgorithmSection(name="gspo", loss="cispo"))
    assert (own.advantage, own.loss) == ("grpo", "cispo")
    assert all(resolve(AlgorithmSection(name=name)).advantage for name in ALGORITHMS if name != "sft")


def test_the_schedule_counts_updates():
    def steps(**algorithm):
        return schedule_steps(samples.configured("m", algorithm=algorithm, trainer={"total_steps": 10}))

    assert steps() == -1
    assert steps(epochs=2, mini_batches=3, optimizer={"schedule": "cosine"}) == 60
    assert steps(epochs=2, optimizer={"schedule": "cosine", "schedule_steps": 7}) == 7


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"architectures": ["A", "B"]}'])
def test_a_directory_without_the_config_of_one_model_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_model_config(str(tmp_path))
    assert refused.value.hint


def test_companions_exclude_weights_and_exclude_code_unless_it_is_allowed(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "torch_dtype": "float32", "own": 1}')
    for name in (
        "tokenizer.model",
        "merges.txt",
        "model.safetensors",
        "pytorch_model.bin",
        "README.md",
        "model.py",
    ):
        (tmp_path / name).write_text(name)
    found = companions(str(tmp_path), "bfloat16", code=False)
    assert set(found) == {"config.json", "tokenizer.model", "merges.txt"}
    assert json.loads(found["config.json"]) == {
        "architectures": ["A"], "torch_dtype": "bfloat16", "dtype": "bfloat16", "own": 1
    }  # fmt: skip
    assert "model.py" in companions(str(tmp_path), "bfloat16", code=True)
