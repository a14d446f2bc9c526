"""Samples as the configuration asks for them."""

import json

import pytest
from trainers import small_config, write_experiences

from syncd.errors import ConfigError
from syncd.protocol.layout import Job
from trainer.experience.limits import Limits
from trainer.sampling import Encoder, make_strategy

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
"""A template that writes one message after the other."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a real tokenizer of single letters: a = 0, b = 1, ..., end of sequence = 26."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({**letters, "<end>": 26}, unk_token="<end>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = CHAT
    path = tmp_path_factory.mktemp("model")
    made.save_pretrained(path)
    return str(path)


@pytest.fixture
def job(tmp_path):
    write_experiences(tmp_path, 12)
    return tmp_path


def examples(path, count=6):
    file = path / "examples.jsonl"
    rows = [{"tokens": [number, 1, 2], "prompt_length": 1} for number in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def drawn(strategy, steps):
    """Return the groups and the examples of batches in a row, as far as there are some."""
    found = []
    for step in range(steps):
        batch = strategy.sample(step, generation=1)
        if batch is None:
            break
        groups = [experience.group for experience in batch.experiences[::2]]
        found.append((groups, [example.tokens[0] for example in batch.examples]))
    return found


def test_whole_groups_first_in_first_out(job):
    strategy = make_strategy(small_config(job), Job.at(job))
    assert [groups for groups, _ in drawn(strategy, 20)] == [[f"{n}-0", f"{n}-1"] for n in range(12)]


def test_replay_draws_a_share_of_each_batch_from_what_was_used(job):
    config = small_config(job, data={"groups": 4, "replay": {"capacity": 8, "share": 0.5}})
    found = [groups for groups, _ in drawn(make_strategy(config, Job.at(job)), 20)]
    assert len(found[0]) == 4
    used = set(found[0])
    for groups in found[1:]:
        assert set(groups[2:]) <= used, "the second half was used before"
        assert not set(groups[:2]) & used, "the first half is fresh"
        used |= set(groups)


def test_a_bound_on_age_drops_what_is_older(job):
    config = small_config(job, data={"max_age": 3}, sync={"interval": 2})
    strategy = make_strategy(config, Job.at(job))
    assert strategy.sample(6, generation=1) is not None, "three versions of two steps"
    assert strategy.sample(8, generation=1) is None
    assert strategy.metrics()["experience/dropped_stale"] > 0


def test_examples_are_mixed_in_at_a_ratio(job):
    config = small_config(job, data={"sft_path": examples(job), "sft_ratio": 0.5})
    (groups, learnt), *_ = drawn(make_strategy(config, Job.at(job)), 1)
    assert len(groups) == 2
    assert len(learnt) == 4, "as many as experiences"


def test_sft_takes_examples_only_and_ends_after_its_epochs(job):
    config = small_config(
        job, algorithm={"name": "sft"}, data={"sft_path": examples(job), "epochs": 2, "group_size": 2}
    )
    strategy = make_strategy(config, Job.at(job))
    found = drawn(strategy, 99)
    assert [groups for groups, _ in found] == [[], [], []]
    assert sorted(number for _, learnt in found for number in learnt) == sorted([*range(6)] * 2)
    assert strategy.over
    assert strategy.metrics() == {"data/epoch": 2.0}


@pytest.mark.parametrize("data", [{}, {"replay": {"capacity": 8}}, {"sft_ratio": 0.25}, {"sft": True}])
def test_a_strategy_goes_on_from_its_state(job, data):
    data = dict(data)
    sections = {"algorithm": {"name": "sft"}} if data.pop("sft", False) else {}
    config = small_config(job, data={"groups": 4, "sft_path": examples(job), **data}, **sections)
    straight = drawn(make_strategy(config, Job.at(job)), 5)
    first = make_strategy(config, Job.at(job))
    before = drawn(first, 2)
    second = make_strategy(config, Job.at(job))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + drawn(second, 3) == straight


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tokens": [5, 6, 7], "prompt_length": 2}, ([5, 6, 7], 2)),
        ({"prompt": "ab", "response": "cd"}, ([0, 1, 2, 3, 26], 2)),
        (
            {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]},
            ([0, 1, 2], 2),
        ),
        ({"prompt": "ab", "response": "cdefghijkl"}, ([0, 1, 2, 3, 4, 5, 6, 7], 2)),
    ],
)
def test_rows_become_tokens(model, row, expected):
    assert Encoder(model, 8, trust=False)(row) == expected


def test_texts_need_a_tokenizer(job):
    (job / "texts.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    config = small_config(
        job, algorithm={"name": "sft"}, data={"sft_path": str(job / "texts.jsonl")}, model={"path": str(job)}
    )
    with pytest.raises(ConfigError, match="no tokenizer"):
        make_strategy(config, Job.at(job))


def test_a_row_that_is_no_example_is_named(job):
    (job / "rows.jsonl").write_text('{"tokens": [1, 2], "prompt_length": 1}\n{"question": "?"}\n')
    config = small_config(job, algorithm={"name": "sft"}, data={"sft_path": str(job / "rows.jsonl")})
    with pytest.raises(ConfigError, match="row 2"):
        make_strategy(config, Job.at(job))


@pytest.mark.parametrize("sections", [{"algorithm": {"name": "sft"}}, {"data": {"sft_ratio": 0.5}}])
def test_a_data_set_that_the_model_cannot_take_is_refused_with_the_row(job, sections):
    data = {"sft_path": examples(job), **sections.get("data", {})}
    strategy = make_strategy(
        small_config(job, data=data, algorithm=sections.get("algorithm", {})), Job.at(job)
    )
    strategy.limit(Limits(vocabulary=6))
    with pytest.raises(ConfigError, match=r"example 6 .* token 5 for a model of 5 tokens"):
        strategy.limit(Limits(vocabulary=5))
