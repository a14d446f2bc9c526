"""What clients of OpenAI's API rely on: errors, models, log-probs, stops, harmless fields, and Responses."""

import contextlib
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_model import make_tokenizer
from support.gateway_bed import TOOL, GatewayBed, ScriptedEngine
from support.gateway_case import write_file
from support.paths import ROOT

from explorer_hooks.parts.agents.api_errors import ApiError
from explorer_hooks.parts.agents.chat import read_request
from explorer_hooks.parts.agents.request_fields import CHAT, REPLACED, RESPONSES
from explorer_hooks.parts.agents.responses_api import read_responses_request
from explorer_hooks.parts.agents.rows import experiences_of
from explorer_hooks.parts.agents.serve import limits_of
from explorer_hooks.parts.agents.stop_strings import cut_at_stop
from explorer_hooks.run.load import load_file
from explorer_hooks.run.tokens import TransformersTokens

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def connect():
    """Return what makes a client, which is closed in the end."""
    with contextlib.ExitStack() as opened:
        yield lambda url, key: opened.enter_context(openai.OpenAI(base_url=url, api_key=key, max_retries=0))


def words(bed, *texts):
    return bed.tokenizer.convert_tokens_to_ids(list(texts))


@pytest.fixture
def served(tmp_path):
    bed = GatewayBed(tmp_path, ScriptedEngine(lambda _: [*words(bed, "the", "call"), 0]), group_size=1)
    with bed.serving() as (driver, http):
        yield bed, driver, http.url


def test_a_missing_or_wrong_key_is_an_authentication_error_and_models_are_known(served, connect):
    _, driver, url = served
    session = driver.session("g", 0)
    status, told = driver.get("/v1/models")
    assert (status, told["error"]["code"], told["error"]["type"]) == (
        401,
        "invalid_api_key",
        "invalid_request_error",
    )
    for key in ("wrong", session["api_key"][:-1]):
        client = connect(f"{url}/v1", key)
        for call in (
            client.models.list,
            lambda client=client: client.models.retrieve("policy"),
            lambda client=client: client.chat.completions.create(model="policy", messages=HELLO),
            lambda client=client: client.responses.create(model="policy", input="hello"),
        ):
            with pytest.raises(openai.AuthenticationError) as error:
                call()
            assert error.value.code == "invalid_api_key"
    for client in (connect(f"{url}/v1", session["api_key"]), connect(session["base_url"], "any")):
        assert client.models.retrieve("policy").id == client.models.list().data[0].id == "policy"
        with pytest.raises(openai.NotFoundError, match="serves 'policy'"):
            client.models.retrieve("org/other")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_those_of_the_record_one_for_each_token(served, connect, stream):
    bed, driver, _ = served
    session = driver.session("g", 0)
    euro = bed.ids("é")
    bed.engine.say = lambda _: [*words(bed, "the", "call"), *euro, 0]
    create = connect(session["base_url"], "any").chat.completions.create
    asked = {"model": "policy", "messages": HELLO, "logprobs": True, "top_logprobs": 0}
    if stream:
        first, *_, last = create(**asked, stream=True, stream_options={"include_usage": True})
        content, usage = first.choices[0].logprobs.content, last.usage
    else:
        answer = create(**asked)
        content, usage = answer.choices[0].logprobs.content, answer.usage
        again = create(**asked, extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].logprobs == answer.choices[0].logprobs, "a retry"
        assert create(model="policy", messages=HELLO).choices[0].logprobs is None
    turn = bed.sessions.by_id[session["session"]].turns[0]
    assert [one.logprob for one in content] == pytest.approx(list(turn.logprobs))
    assert len(content) == usage.completion_tokens == len(turn.tokens)
    assert [one.token for one in content[:2]] == ["the", "call"]
    assert bytes(content[1].bytes) == b"call"
    assert len(euro) == 2
    assert [one.bytes for one in content[2:4]] == [None, None], "parts of a character"
    assert content[-1].token == "<|end|>"


def rows(bed):
    return experiences_of(bed.sessions.groups["g"], "g", 1.0)


def test_an_answer_ends_before_a_stop_and_its_record_with_the_token_that_completes_it(tmp_path):
    """By hand: the call -> `all` begins inside the token `call`, which is kept whole, and trained."""
    engine = ScriptedEngine(None)
    bed = GatewayBed(tmp_path, engine, group_size=1)
    kept, behind = words(bed, "the", "call"), words(bed, "in", "an")
    engine.say = lambda _: [*kept, *behind]

    async def main(bed):
        session = await bed.session()
        said, history = await bed.ask(session, HELLO, stop=["zzz", "all"])
        assert said["content"] == "thec"
        assert bed.sessions.by_id[session].turns[0].answer.finish == "stop"
        await bed.ask(session, [*history, {"role": "user", "content": "go on"}])
        await bed.gateway.reward(session, {"reward": 1.0})
        return rows(bed)

    (row,) = bed.run(main)
    between = bed.ids("<|end|>\n<|user|>go on<|end|>\n<|assistant|>")
    assert list(row.tokens[row.prompt_length :]) == [*kept, *between, *engine.say(())]
    assert list(row.action_mask) == [True] * 2 + [False] * len(between) + [True] * 4
    assert list(row.logprobs[:2]) == pytest.approx([-0.5 - 0.001 * one for one in kept])
    assert engine.prompts[1] == [*engine.prompts[0], *kept, *between]
    again = GatewayBed(tmp_path, engine, group_size=1)
    again.close()
    assert rows(again) == [row], "replayed"


def test_a_later_attempt_gets_what_was_drawn_with_the_same_stops_alone(tmp_path):
    engine = ScriptedEngine(None)
    bed = GatewayBed(tmp_path, engine, group_size=1)
    count = iter(range(100))
    engine.say = lambda _: [*bed.ids(f"the call {next(count)}"), 0]

    async def main(bed):
        first = await bed.session()
        drawn = [
            (await bed.ask(first, HELLO, stop=stop))[0]["content"] for stop in ("all", None, ["x", "all"])
        ]
        assert drawn == ["the c", "the call 1", "the c"]
        second = await bed.session(attempt=1)
        given = [(await bed.ask(second, HELLO, stop=stop))[0]["content"] for stop in (None, ["all"], "l 3")]
        assert given == ["the call 1", "the c", "the cal"]
        return len(engine.prompts)

    assert bed.run(main) == 4


TEXTS = st.text(st.sampled_from("thecalin é€"), max_size=12)


@settings(max_examples=200)
@given(TEXTS, st.lists(TEXTS.filter(bool).map(lambda text: text[:3]), min_size=1, max_size=3), st.booleans())
def test_the_shortest_beginning_that_has_a_stop_is_kept(text, stop, letters):
    tokenizer = make_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if letters:  # text is not cut into these
        tokens = [
            one
            for word in tokens
            for one in tokenizer.convert_tokens_to_ids(list(tokenizer.convert_ids_to_tokens(word)))
        ]
    text_of = TransformersTokens(tokenizer).raw_text
    cut = cut_at_stop(tokens, stop, text_of)
    sizes = [size for size in range(len(tokens) + 1) if any(one in text_of(tokens[:size]) for one in stop)]
    assert (cut is None) == (not sizes)
    if cut is not None:
        assert cut.tokens == sizes[0]
        kept = text_of(tokens[: cut.tokens])
        assert kept.startswith(cut.text)
        assert any(kept[len(cut.text) :].startswith(one) for one in stop)
        assert not any(one in cut.text for one in stop)


HARMLESS = [
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools"),
]
MEANT_FOR_NOTHING = {
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "reasoning_effort": None,
    "model": "x",
    "user": "x",
    "store": True,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}],
}


@pytest.mark.parametrize(("more", "param"), HARMLESS, ids=str)
def test_harmless_fields_are_tolerated_or_refused_by_name(more, param):
    asked = read_request({"messages": HELLO, **more})
    assert [name.partition(".")[0] for name in asked.tolerated] == [param]
    plain = read_request({"messages": HELLO, **({"tools": [TOOL]} if param == "tools" else {})})
    assert (asked.key, asked.tools) == (plain.key, plain.tools), "the model is told of nothing else"
    with pytest.raises(ApiError, match='harmless_fields = "tolerate"') as error:
        read_request({"messages": HELLO, **more}, tolerates=False)
    assert (error.value.status, error.value.param) == (400, param)


def test_fields_that_ask_for_nothing_are_taken_in_both_modes():
    for tolerates in (False, True):
        assert read_request({"messages": HELLO, **MEANT_FOR_NOTHING}, tolerates=tolerates).tolerated == ()


def test_a_file_says_whether_harmless_fields_are_refused(tmp_path, connect):
    """From the key of the job's file to the answer of a client, also of a field within a field."""
    for mode, refused in (("tolerate", False), ("refuse", True)):
        path = write_file(tmp_path / "job.toml", tmp_path)
        limits = limits_of(
            load_file(path, ["--explorer.gateway.harmless_fields", mode, "--explorer.tasks", "t.jsonl"])
        )
        assert limits.tolerates is not refused
        bed = GatewayBed(tmp_path / mode, ScriptedEngine(lambda _: [10, 0]), tolerates=limits.tolerates)
        with bed.serving() as (driver, _):
            create = connect(driver.session("g", 0)["base_url"], "any").responses.create
            asked = {"model": "x", "input": "hello", "text": {"verbosity": "low"}}
            if not refused:
                assert create(**asked).status == "completed"
                continue
            with pytest.raises(openai.BadRequestError, match='"low"') as error:
                create(**asked)
            assert error.value.param == "text.verbosity"


def test_the_table_of_the_page_has_each_field_in_its_row():
    """Of each API: used, replaced, harmless and single values; the page promises what the tables say."""
    page = (ROOT / "docs/json.md").read_text()
    table = page.partition("### What is served")[2].partition("\n## ")[0]
    served = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    for name, api in (("Chat completions", CHAT), ("Responses", RESPONSES)):
        for row, fields in (("used", api.used), ("harmless", api.harmless), ("one value", api.only)):
            for one in fields:
                assert f"`{one}" in served[f"{name}: {row}"], (name, row, one)
    assert all(f"`{one}`" in served["Both: replaced"] for one in REPLACED)


# --- Responses ------------------------------------------------------------------------------------------------

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]}


def test_a_history_of_items_is_the_history_of_messages_that_says_the_same():
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    function = {"name": "add", "arguments": '{"a":1}'}
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    items = [*HELLO, thought, said, CALL, {**CALL, "call_id": "c2"}, RESULT, RESULT, CALL, RESULT]
    asked = read_responses_request(
        {"input": items, "instructions": "Add.", "tools": [tool], "max_output_tokens": 9}
    )
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    messages = [
        {"role": "system", "content": "Add."},
        *HELLO,
        {"role": "assistant", "content": "so", "tool_calls": calls},
        result,
        result,
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        result,
    ]
    same = read_request({"messages": messages, "tools": [TOOL], "max_tokens": 9})
    assert (asked.keys, asked.key, asked.tolerated) == (same.keys, same.key, ("tools.strict",))
    assert asked.messages[2]["reasoning_content"] == "hm"
    assert read_responses_request({"input": "hello"}).messages == read_request({"messages": HELLO}).messages


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"stop": "x"}, "stop"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{**CALL, "name": None}]}, "input"),
        ({"input": [*HELLO, {"role": "assistant", "content": "x"}]}, "input"),
        ({"input": None}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=str,
)
def test_what_responses_cannot_be_served_are_refused_by_name(more, param):
    with pytest.raises(ApiError) as error:
        read_responses_request({"input": "hello", **more})
    assert (error.value.status, error.value.param) == (400, param)


WORDS = [
    "type",
    "role",
    "content",
    "input",
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "text",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*WORDS, "output", "call_id"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(JSON, st.lists(JSON, max_size=4))
def test_garbage_is_refused_and_never_an_error_of_the_gateway(body, items):
    for one in (body, {"input": items}, {"input": "x", "text": body, "instructions": body}):
        with contextlib.suppress(ApiError):
            read_responses_request(one)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_say_whether_they_were_cut_and_how_many_tokens_they_have(served, connect, stream):
    bed, driver, _ = served
    session = driver.session("g", 0)
    create = connect(session["base_url"], "any").responses.create
    asked = {"model": "gpt-5", "input": "hello", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}

    def answered(**more):
        made = create(**asked, **more, stream=stream)
        return list(made)[-1].response if stream else made

    whole, cut = answered(), answered(max_output_tokens=1)
    assert (whole.status, whole.output_text, whole.incomplete_details) == ("completed", "thecall", None)
    assert (cut.status, cut.output_text, cut.incomplete_details.reason) == (
        "incomplete",
        "the",
        "max_output_tokens",
    )
    turn = bed.sessions.by_id[session["session"]].turns[0]
    assert (whole.usage.output_tokens, whole.usage.input_tokens) == (3, len(turn.prompt))
    names = {whole.id: 0.5, cut.id: 0.25}
    assert driver.post(f"/s/{session['session']}/reward", {"reward": 0.75, "turn_rewards": names})[0] == 200


def test_a_stream_has_the_events_of_each_item_in_order(served, connect):
    bed, driver, _ = served
    said = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    bed.engine.say = lambda _: [*bed.ids(said), 0]
    session = driver.session("g", 0)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    events = list(
        connect(session["base_url"], "any").responses.create(
            model="x", input="hello", tools=[tool], stream=True
        )
    )
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    message, call = events[-1].response.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 1})
    assert events[4].delta == "so"
    assert events[9].delta == call.arguments
