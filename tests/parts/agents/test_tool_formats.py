"""Calls of tools as models write them, read by the format that a chat template itself writes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_model import TEMPLATE
from support.chat_templates import BAR, DIRECTORY, template_tokenizer
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.gateway_case import write_file

from explorer_hooks.cli.main import run as command_line
from explorer_hooks.parts.agents.answers import AnswerParser
from explorer_hooks.parts.agents.api_errors import ApiError
from explorer_hooks.parts.agents.tool_formats import read_calls, typed_value, written_format
from explorer_hooks.run.tokens import TransformersTokens

SHIPPED = {
    "qwen2_5": ("hermes", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>"),
    "qwen3_instruct_2507": ("hermes", "<|im_end|>"),
    "qwen3_vl": ("hermes", "<|im_end|>"),
    "qwen3_5_think": ("qwen3_coder", "<|im_end|>"),
    "qwen3_5_nothink": ("qwen3_coder", "<|im_end|>"),
    "qwen3_6": ("qwen3_coder", "<|im_end|>"),
    "qwen3_8": ("qwen3_coder", "<|im_end|>"),
    "nemotron_3_nano": ("qwen3_coder", "<|im_end|>"),
    "nemotron_3_super": ("qwen3_coder", "<|im_end|>"),
    "nemotron_3_ultra": ("qwen3_coder", "<|im_end|>"),
    "nemotron_3_5_lightning": ("qwen3_coder", "<|im_end|>"),
    "glm4moe": ("glm45", "<|user|>"),
    "llama3_1": ("llama3", "<|eot_id|>"),
    "llama3_2": ("llama3", "<|eot_id|>"),
    "gemma3": ("untold", "<end_of_turn>"),
    "phi3_5": ("untold", "<|end|>"),
    "deepseekv3": ("untold", f"<{BAR}end\u2581of\u2581sentence{BAR}>"),
    "gemma4": (None, "<turn|>"),
    "gptoss": (None, "<|return|>"),
    "lfm2_v2": (None, "<|im_end|>"),
    "lfm2_2_5": (None, "<|im_end|>"),
}
"""Templates that trl ships: the format of their calls, and a token that ends an answer.

untold: the template tells the model of no tools. None: no format reads what it writes.
"""

MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}CALLS</s>{% endif %}{% endfor %}"
)
LISTED = (
    "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ dict(c.function, id=c.id) | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
)
NAMED = (
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
OWN = {
    "own": (TEMPLATE, "hermes", "<|end|>"),
    "mistral-listed": (MISTRAL.replace("CALLS</s>", f"{LISTED}</s>"), "mistral", "</s>"),
    "mistral-named": (MISTRAL.replace("CALLS</s>", f"{NAMED}</s>"), "mistral", "</s>"),
}

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array"},
    "where": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find.it-now",
        "description": "finds",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
    },
}
PLAIN = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEXT = st.text(st.sampled_from("ab 1\n0,é😀\"{}'\\[]:-"), max_size=12).filter(
    lambda text: "[TOOL" not in text
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT | st.sampled_from(["12", "true", "null", '{"a": 1}', "    indented\n  twice"]),
        "count": st.integers(-9, 99),
        "share": st.floats(-9, 9),
        "deep": st.booleans(),
        "items": st.lists(st.integers(0, 9) | TEXT, max_size=3),
        "where": st.dictionaries(st.sampled_from("xyz"), TEXT | st.none(), max_size=2),
        "maybe": st.none() | st.sampled_from(["12", "x", "False."]),
    },
)


def _cases():
    for name, (template, tool_format, end) in OWN.items():
        yield pytest.param(template, tool_format, end, id=name)
    missing = pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"no {DIRECTORY}: make prepares it")
    for name, (tool_format, end) in SHIPPED.items():
        path = DIRECTORY / f"{name}.jinja"
        yield pytest.param(
            path.read_text() if path.exists() else "", tool_format, end, id=name, marks=missing
        )


@pytest.mark.parametrize(("template", "tool_format", "end"), list(_cases()))
def test_what_a_template_writes_for_calls_is_read_back_value_by_value(template, tool_format, end):
    tokens = TransformersTokens(template_tokenizer(template, [end]))
    assert written_format(tokens, [end]) == tool_format
    if tool_format in (None, "untold"):
        return
    parser, question = AnswerParser(tool_format, template), {"role": "user", "content": "go"}
    several = 1 if tool_format == "llama3" else 3
    told = tokens.chat_text([question], [TOOL], {}, answers=True)

    @settings(max_examples=30)
    @given(st.lists(ARGUMENTS, min_size=1, max_size=several), st.sampled_from(["", "so:"]))
    def check(drawn, said):
        said = "" if tool_format == "llama3" else said
        calls = [
            {"id": f"lookup00{at}", "type": "function", "function": {"name": "find.it-now", "arguments": one}}
            for at, one in enumerate(drawn)
        ]
        answer = {"role": "assistant", "content": said, "tool_calls": calls}
        whole = tokens.chat_text([question, answer], [TOOL], {}, answers=False)
        same = next((at for at, (a, b) in enumerate(zip(told, whole, strict=False)) if a != b), len(told))
        read = parser.parse(whole[same:].partition(end)[0], tools=[TOOL], is_whole=True)
        assert [(name, json.loads(text)) for name, text in read.calls.values()] == [
            ("find.it-now", one) for one in drawn
        ]
        assert (read.content, read.finish) == (said, "tool_calls")

    check()


def test_calls_of_tools_are_read_as_each_format_writes_them():
    def read(tool_format, text, **more):
        answer = AnswerParser(tool_format, "<think></think>").parse(
            text, **{"tools": [PLAIN], "is_whole": True, **more}
        )
        calls = [(name, json.loads(arguments)) for name, arguments in answer.calls.values()]
        return answer.reasoning, answer.content, calls, answer.finish

    add = ("add", {"a": 1})
    two = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' * 2
    assert read("hermes", f"<think>hm</think>{two}") == ("hm", "so", [add, add], "tool_calls")
    assert read("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]')[1:3] == ("", [add])
    assert read("mistral", 'so[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}')[2] == [add, add]
    assert read("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}')[1:3] == ("", [add])
    for text in ("<tool_call>{oops</tool_call>", "<tool_call>[1]</tool_call>", "plain"):
        assert read("hermes", text) == ("", text, [], "stop")
    assert read("hermes", two, is_whole=False)[2:] == ([], "length")
    assert read("none", two)[2:] == ([], "stop")
    assert read("hermes", two, tools=[])[2:] == ([], "stop")


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    ],
)
def test_a_call_that_was_cut_or_has_anything_else_in_it_is_text(tool_format, call):
    """Each prefix of a call, but those that lack only what closes the call, and each call with a word in it."""
    whole = [("add", json.dumps({"a": 1}))]
    assert read_calls(tool_format, call, [PLAIN])[1] == whole
    closed = call.removesuffix("</tool_call>").rstrip()
    for end in range(len(closed)):
        calls = read_calls(tool_format, call[:end], [PLAIN])[1]
        assert calls in ([], [("ad", "{}")], [("a", "{}")], [("add", "{}")]), call[:end]
        assert not calls or tool_format == "glm45", call[:end]
    if tool_format != "mistral":
        for mark in ("<parameter", "<arg_key>", "</function>"):
            broken = call.replace(mark, f"oops oops{mark}", 1)
            assert broken == call or read_calls(tool_format, broken, [PLAIN])[1] == []


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("hermes", r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\\ud83d\"}"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "add", "arguments": "\ud83d"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "add\ud83d", "arguments": {}}</tool_call>'),
        (
            "qwen3_coder",
            r'<tool_call><function=add><parameter=a>["\ud83d"]</parameter></function></tool_call>',
        ),
        ("glm45", r'<tool_call>add<arg_key>a</arg_key><arg_value>{"\ud83d": 1}</arg_value></tool_call>'),
        ("mistral", r'[TOOL_CALLS]add[ARGS]{"a": "\ud83d"}'),
        ("llama3", r'{"name": "add", "parameters": {"a": "\ud83d"}}'),
    ],
)
def test_a_call_with_half_a_character_is_text(tool_format, call):
    assert read_calls(tool_format, call, [PLAIN]) == (call, [])


def test_a_call_with_both_halves_of_a_character_is_a_call():
    text = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d\ude00"}}</tool_call>'
    assert read_calls("hermes", text, [PLAIN]) == ("", [("add", '{"a": "\N{GRINNING FACE}"}')])


@pytest.mark.parametrize(
    "repeated", ["<parameter=a>", "<arg_key>", "<tool_call>", "[TOOL_CALLS]a[ARGS]", "</function>"]
)
def test_an_answer_that_repeats_a_tag_without_end_is_read_at_once(repeated):
    """200,000 characters; a reader that looks for the end from each tag would take minutes."""
    text = "<tool_call><function=f>" + repeated * (200_000 // len(repeated)) + "</function></tool_call>"
    for tool_format in ("hermes", "qwen3_coder", "glm45", "mistral", "llama3"):
        assert read_calls(tool_format, text, [PLAIN])[1] == []


def test_values_without_quotes_have_the_type_that_the_tool_declares():
    """By hand; what the declared types do not allow stays text where text is allowed."""
    for text, types, value in (
        ("12", {"string"}, "12"),
        (" 12\n", {"string"}, " 12\n"),
        ("12", {"integer"}, 12),
        ("12", {"string", "null"}, "12"),
        ("null", {"string", "null"}, None),
        ("12", {"string", "integer"}, 12),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("None", {"integer", "null"}, None),
        ("[1, 2", {"array"}, "[1, 2"),
        ("12", None, 12),
        ("twelve", None, "twelve"),
        ('"12"', None, '"12"'),
    ):
        assert typed_value(text, None if types is None else frozenset(types)) == value, (text, types)


def test_a_start_that_finds_no_reader_for_a_template_with_tools_is_refused(tmp_path, capsys):
    template = TEMPLATE.replace(
        "<tool_call>{{ call.function | tojson }}</tool_call>", "CALL {{ call.function.name }}"
    )
    template_tokenizer(template, ["<|end|>"]).save_pretrained(tmp_path / "model")
    file = write_file(tmp_path / "job.toml", tmp_path / "model")
    serve = ["serve", str(file), "--name", "e0"]
    assert command_line(serve) == 78
    said = capsys.readouterr().err
    assert "tool_format" in said
    assert str(tmp_path / "model") in said
    command_line([*serve, "--explorer.gateway.tool_format", "none", "--explorer.engine.spans", "off"])
    assert "reads the calls of tools" not in capsys.readouterr().err


def test_tools_that_the_template_never_tells_the_model_of_are_refused(tmp_path):
    bed = GatewayBed(tmp_path, ScriptedEngine(lambda _: [10, 0]), tool_format="untold")

    async def main(bed):
        session = await bed.session()
        await bed.ask(session, [{"role": "user", "content": "hello"}])
        with pytest.raises(ApiError, match="tells it of no tools"):
            await bed.ask(session, [{"role": "user", "content": "hello"}], tools=[PLAIN])

    bed.run(main)
