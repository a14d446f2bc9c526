"""Samples as the configuration asks for them."""

import json

import pytest
from support.chat_model import make_tokenizer
from support.trainers import small_config, write_experiences

from syncd.errors import ConfigError
from syncd.protocol.layout import Job
from trainer.experience.limits import Limits
from trainer.reporting.report import Screen
from trainer.sampling import Encoder, load_tokenizer, make_strategy

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


def test_the_fifo_strategy_draws_whole_groups_in_order(job):
    strategy = make_strategy(small_config(job), Job.at(job))
    assert [groups for groups, _ in drawn(strategy, 20)] == [[f"{n}-0", f"{n}-1"] for n in range(12)]


def test_replay_draws_a_share_of_each_batch_from_used_groups(job):
    config = small_config(job, data={"groups": 4, "replay": {"capacity": 8, "share": 0.5}})
    found = [groups for groups, _ in drawn(make_strategy(config, Job.at(job)), 20)]
    assert len(found[0]) == 4
    used = set(found[0])
    for groups in found[1:]:
        assert set(groups[2:]) <= used, "the second half was used before"
        assert not set(groups[:2]) & used, "the first half is fresh"
        used |= set(groups)


def test_max_age_drops_older_experiences(job):
    config = small_config(job, data={"max_age": 3}, sync={"interval": 2})
    strategy = make_strategy(config, Job.at(job))
    assert strategy.sample(6, generation=1) is not None, "three versions of two steps"
    assert strategy.sample(8, generation=1) is None
    assert strategy.metrics()["experience/dropped_stale"] > 0


def test_sft_examples_are_mixed_in_at_sft_ratio(job):
    config = small_config(job, data={"sft_path": examples(job), "sft_ratio": 0.5})
    (groups, learnt), *_ = drawn(make_strategy(config, Job.at(job)), 1)
    assert len(groups) == 2
    assert len(learnt) == 4, "as many as experiences"


def test_sft_draws_examples_only_and_ends_after_its_epochs(job):
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
def test_a_strategy_resumes_from_its_state(job, data):
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
    ],
)
def test_sft_rows_are_encoded_to_tokens(model, row, expected):
    assert Encoder(model, trust=False)(row) == expected


def test_rows_of_texts_need_a_tokenizer_with_an_end_of_sequence_token(model, job, tmp_path):
    import transformers

    path = tmp_path / "endless"
    made = transformers.AutoTokenizer.from_pretrained(model)
    made.eos_token = None
    made.save_pretrained(path)
    file = job / "texts.jsonl"
    file.write_text('{"prompt": "ab", "response": "cd"}\n')
    tables = {"algorithm": {"name": "sft"}, "data": {"sft_path": str(file)}, "model": {"path": str(path)}}
    with pytest.raises(ConfigError, match="no end-of-sequence token") as caught:
        make_strategy(small_config(job, **tables), Job.at(job))
    assert "tokenizer_config.json" in caught.value.hint
    assert caught.value.exit_code == 78
    assert Encoder(str(path), trust=False)({"tokens": [5, 6], "prompt_length": 1}) == ([5, 6], 1)


TEMPLATES = {
    "ChatML": ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n", ""),
    "nothing after it": ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>", "<|im_start|>assistant\n", ""),
    "end of text after it": (
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n", "<|endoftext|>",
    ),
}  # fmt: skip
"""What a chat template writes for a message, before a reply that is to come, and after a conversation without one."""


def chat_model(path, kind):
    """Make a tokenizer of single letters with a template; as in Qwen, the end of a turn is a special token."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    message, reply, end = TEMPLATES[kind]
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz?\n")}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    made.chat_template = (
        f"{{% for m in messages %}}{message}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{reply}{{% else %}}{end}{{% endif %}}"
    )
    made.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("content", ["de", "de\n", "d\ne"])
def test_only_the_last_turn_up_to_its_end_token_is_learnt(tmp_path, kind, content):
    import transformers

    path = chat_model(tmp_path, kind)
    talk = [("user", "ab"), ("assistant", "c"), ("user", "b"), ("assistant", content)]
    row = {"messages": [{"role": role, "content": text} for role, text in talk]}
    tokens, prompt_length = Encoder(path, trust=False)(row)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = [*(tokenizer.convert_tokens_to_ids(letter) for letter in content), end]
    assert list(tokens[prompt_length:]) == expected
    assert tokens[:prompt_length].count(end) == 3


def test_calls_of_tools_are_learnt_as_the_template_writes_them_from_objects_and_from_text(tmp_path):
    """OpenAI's format has arguments as JSON text, and Parquet has None for what a message lacks."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
    told = f"<|system|>You may call <tool_call>:{json.dumps(tool)}<|end|>\n"
    expected = f"{told}<|user|>ab<|end|>\n<|assistant|>{called}"
    for arguments, tools in (({"a": 1}, [tool]), ('{"a": 1}', json.dumps([tool]))):
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
        row = {
            "messages": [
                {"role": "user", "content": "ab", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": tools,
        }
        tokens, prompt = Encoder(str(tmp_path), trust=False)(row)
        assert [tokenizer.decode(part) for part in (tokens, tokens[prompt:])] == [expected, called]


ROWS = [(2, 3), (8, 2), (3, 9), (7, 1), (40, 5)]
"""Rows of an SFT data set: tokens of prompt and of response."""


def stored(path, rows):
    file = path / "rows.jsonl"
    lines = [
        {"tokens": [number, *range(1, prompt + response)], "prompt_length": prompt}
        for number, (prompt, response) in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"sft_path": str(file), "max_length": 8, "groups": 1, "group_size": 1, "epochs": 2}


def test_sft_rows_with_too_long_prompts_are_skipped_and_counted(job, capsys):
    config = small_config(job, algorithm={"name": "sft"}, data=stored(job, ROWS))
    strategy = make_strategy(config, Job.at(job))
    said = capsys.readouterr()
    assert "sft_rows_skipped" in said.out + said.err
    assert "skipped=2" in said.out + said.err
    first = strategy.sample(0, generation=1)
    kept = strategy.state_dict()
    rest = [strategy.sample(step, generation=1) for step in range(1, 6)]
    found = [
        (one.tokens[0], len(one.tokens), one.prompt_length) for b in [first, *rest] for one in b.examples
    ]
    assert sorted(found) == sorted(2 * [(0, 5, 2), (2, 8, 3), (3, 8, 7)]), "two epochs of the three others"
    assert strategy.over
    resumed = make_strategy(config, Job.at(job))
    resumed.load_state_dict(json.loads(json.dumps(kept)))
    assert [resumed.sample(step, generation=1) for step in range(1, 6)] == rest


def test_an_sft_file_without_room_for_any_response_is_refused(job):
    config = small_config(job, algorithm={"name": "sft"}, data=stored(job, [(8, 2), (40, 5)]))
    with pytest.raises(
        ConfigError, match=r"data\.max_length = 8: the shortest prompt has 8 tokens"
    ) as refused:
        make_strategy(config, Job.at(job))
    assert refused.value.hint == "--data.max_length 80"


def test_text_rows_without_a_tokenizer_are_refused(job):
    (job / "texts.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    config = small_config(
        job, algorithm={"name": "sft"}, data={"sft_path": str(job / "texts.jsonl")}, model={"path": str(job)}
    )
    with pytest.raises(ConfigError, match="no tokenizer"):
        make_strategy(config, Job.at(job))


def test_a_malformed_sft_row_is_named(job):
    (job / "rows.jsonl").write_text('{"tokens": [1, 2], "prompt_length": 1}\n{"question": "?"}\n')
    config = small_config(job, algorithm={"name": "sft"}, data={"sft_path": str(job / "rows.jsonl")})
    with pytest.raises(ConfigError, match="row 2"):
        make_strategy(config, Job.at(job))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            "no system role",
        ),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "out of range"),
        ({"messages": ["a", "b"]}, "'str' object"),
        ({"prompt": "a", "response": None}, "ValueError"),
    ],
    ids=["refused by the template", "no prompt", "texts", "no text"],
)
def test_a_row_that_template_or_tokenizer_cannot_take_is_named(job, tmp_path, row, reason):
    model = chat_model(tmp_path / "model", "ChatML")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    (job / "rows.jsonl").write_text(f'{{"tokens": [1, 2], "prompt_length": 1}}\n{json.dumps(row)}\n')
    data = {"sft_path": str(job / "rows.jsonl")}
    config = small_config(job, algorithm={"name": "sft"}, data=data, model={"path": str(model)})
    with pytest.raises(ConfigError, match=f"row 2 .*{reason}"):
        make_strategy(config, Job.at(job))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused_with_its_directory_and_ends_no_run_that_only_shows_texts(
    job, tmp_path, name
):
    path = tmp_path / "model"
    chat_model(path, "ChatML")
    (path / name).write_text("{}" if name == "tokenizer.json" else "[]")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded") as caught:
        load_tokenizer(str(path))
    assert caught.value.path == str(path)
    screen = Screen(small_config(job, model={"path": str(path)}), 0, lambda: None)
    screen.close()


@pytest.mark.parametrize("sections", [{"algorithm": {"name": "sft"}}, {"data": {"sft_ratio": 0.5}}])
def test_an_sft_file_with_unknown_tokens_is_refused_naming_the_row(job, sections):
    data = {"sft_path": examples(job), **sections.get("data", {})}
    strategy = make_strategy(
        small_config(job, data=data, algorithm=sections.get("algorithm", {})), Job.at(job)
    )
    strategy.limit(Limits(vocabulary=6))
    with pytest.raises(ConfigError, match=r"example 6 .* token 5 for a model of 5 tokens"):
        strategy.limit(Limits(vocabulary=5))
