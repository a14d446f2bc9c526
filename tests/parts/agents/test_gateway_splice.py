"""Exact prompts: recorded tokens, and behind them what a chat template writes; over real templates."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_model import MARKS, TEMPLATE
from support.chat_templates import BAR, DIRECTORY, SPECIAL, template_tokenizer
from support.real_vocabulary import real_tokenizer, vocabulary_file

from explorer_hooks.parts.agents.chat import read_request
from explorer_hooks.parts.agents.splice import Splicer, end_tokens
from explorer_hooks.run.tokens import TransformersTokens

THINKING = """\
{%- set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > last.user %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Leaves reasoning out of answers before the last question, as Qwen3 does."""

CALLS = "{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}{% endfor %}"
INSTRUCTED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}"
    + CALLS
    + "</s>"
    "{% else %}[RESULT]{{ m.content }}[/RESULT]{% endif %}{% endfor %}"
)
"""Tells of the tools before the last question."""

ENDED_BY_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Has no end of a turn but the next role."""

CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)
"""Closes the text where no answer follows."""

AS_TEXT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[CALL]' + c.function.arguments }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
"""Takes the arguments of calls as text."""

IN_TWO_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% for c in m.tool_calls or [] %}"
    "<|call|>{{ c.function | tojson }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Ends what an answer says, and then each of its calls."""

OWN = {
    "own": (TEMPLATE, ["<|end|>"], "tools system"),
    "thinking": (THINKING, ["<|im_end|>"], "tools system"),
    "instructed": (INSTRUCTED, ["</s>"], "tools system"),
    "ended-by-role": (ENDED_BY_ROLE, ["<|user|>", "<|tool|>"], "tools system"),
    "closed": (CLOSED, ["<|end|>"], "system"),
    "in-two-parts": (IN_TWO_PARTS, ["<|end|>"], "tools system"),
    "as-text": (AS_TEXT, ["<|end|>"], "tools system"),
}
SHIPPED = {
    "cohere": (["<|END_OF_TURN_TOKEN|>"], "system"),
    "cohere2": (["<|END_OF_TURN_TOKEN|>"], "system"),
    "deepseekv3": ([f"<{BAR}end\u2581of\u2581sentence{BAR}>"], "tools system"),
    "gemma": (["<end_of_turn>"], ""),
    "gemma3": (["<end_of_turn>"], ""),
    "glm4moe": (["<|user|>", "<|observation|>"], "tools system"),
    "lfm2": (["<|im_end|>"], "tools system"),
    "lfm2_v2": (["<|im_end|>"], "tools system"),
    "llama3": (["<|eot_id|>"], "system"),
    "llama3_1": (["<|eot_id|>", "<|eom_id|>"], "tools system single"),
    "llama3_2": (["<|eot_id|>"], "tools system single"),
    "nemotron_3_nano": (["<|im_end|>"], "tools system"),
    "phi3": (["<|end|>"], "system"),
    "phi3_5": (["<|end|>"], "system"),
    "qwen2_5": (["<|im_end|>"], "tools system"),
    "qwen3": (["<|im_end|>"], "tools system"),
    "qwen3_instruct_2507": (["<|im_end|>"], "tools system"),
    "qwen3_5_think": (["<|im_end|>"], "tools system"),
}
"""Templates that trl ships: the tokens that end an answer, and what they take besides questions and answers.

single: they refuse an answer that calls several tools.
"""

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
TEXT = st.text(st.sampled_from("abc the\n 0,é€😀\"{}'\\"), max_size=12)


def _cases():
    for name, (template, ends, kinds) in OWN.items():
        yield pytest.param(template, ends, kinds, id=name)
    missing = pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"no {DIRECTORY}: make prepares it")
    for name, (ends, kinds) in SHIPPED.items():
        path = DIRECTORY / f"{name}.jinja"
        yield pytest.param(path.read_text() if path.exists() else "", ends, kinds, id=name, marks=missing)


def _splicer(template, ends):
    tokenizer = template_tokenizer(template, ends)
    return tokenizer, Splicer(
        TransformersTokens(tokenizer), {tokenizer.convert_tokens_to_ids(e): e for e in ends}
    )


@st.composite
def conversations(draw, kinds):
    """Draw messages whose contents each have a word of their own, and the place of the last answer.

    Behind it are the results of all its calls, several if the template takes several, or a question.
    """
    words = (f"w{number}x" for number in itertools.count())

    def said(role, **more):
        return {"role": role, "content": f"{next(words)} {draw(TEXT)}".strip(), **more}

    made = [said("system")] if "system" in kinds and draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        made.append(said("user"))
        if "tools" in kinds and draw(st.booleans()):
            several = draw(st.integers(1, 3)) if "single" not in kinds else 1
            calls = [
                _call(next(words), draw(st.integers(0, 99)), f"call{turn}abc{n}") for n in range(several)
            ]
            made.append(said("assistant", tool_calls=calls))
            made += [said("tool", tool_call_id=call["id"], name="add") for call in calls]
        else:
            made += [said("assistant"), said("user")]
        made.append(said("assistant"))
    last = draw(st.sampled_from([at for at, one in enumerate(made) if one["role"] == "assistant"]))
    after = list(itertools.takewhile(lambda one: one["role"] != "assistant", made[last + 1 :])) or [
        said("user")
    ]
    return last, {"messages": [*made[: last + 1], *after], "tools": [TOOL] if "tools" in kinds else None}


def _call(why, number, name):
    called = {"name": "add", "arguments": json.dumps({"why": why, "n": number})}
    return {"id": name, "type": "function", "function": called}


def _real_splicer(template, ends):
    """Return a splicer whose text is cut by the vocabulary of a real model, with the template's special tokens."""
    tokenizer = real_tokenizer()
    tokenizer.add_tokens(list(dict.fromkeys([*ends, *SPECIAL.findall(template)])), special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token, tokenizer.bos_token = template, ends[0], "<s>"
    return tokenizer, Splicer(
        TransformersTokens(tokenizer), {tokenizer.convert_tokens_to_ids(e): e for e in ends}
    )


NEEDS_FILE = pytest.mark.skipif(vocabulary_file() is None, reason="no mistral-common: make prepares it")
VOCABULARIES = (
    pytest.param(_splicer, 25, id="bytes-and-merges"),
    pytest.param(_real_splicer, 100, id="tekken", marks=[NEEDS_FILE, pytest.mark.group("tekken")]),
)
"""By how many examples each."""


@pytest.mark.fault("an agent's history splits although nothing of it has changed")
@pytest.mark.parametrize(("template", "ends", "kinds"), list(_cases()))
@pytest.mark.parametrize(("make", "examples"), VOCABULARIES)
def test_a_continuation_is_the_end_of_the_whole_text_token_by_token(make, examples, template, ends, kinds):
    tokenizer, splicer = make(template, ends)

    @settings(max_examples=examples)
    @given(conversations(kinds))
    def check(drawn):
        at, body = drawn
        request = read_request(body)
        cut = splicer.continuation(request, at, tokenizer.convert_tokens_to_ids("a"))
        assert cut is not None, "a false split"
        end, *after = cut
        assert splicer.ends[end] in ends
        assert splicer.continuation(request, at, end) == after, "an answer that has ended is not ended again"
        whole = splicer.prompt(request)
        assert whole[-len(cut) :] == cut
        text = tokenizer.decode(cut)
        old, new = request.messages[: at + 1], request.messages[at + 1 :]
        assert all(one["content"].split()[0] in text for one in new)
        assert not any(one["content"].split()[0] in text for one in old)

    check()


@pytest.mark.parametrize(
    ("template", "ends", "kinds"), [one for one in _cases() if "single" in one.values[2]]
)
def test_templates_that_take_one_call_an_answer_refuse_two(template, ends, kinds):
    """The gateway answers with 400: what such a template cannot write, it cannot continue."""
    _, splicer = _splicer(template, ends)
    calls = [_call("sum", number, f"call{number}abcd") for number in range(2)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    history = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    request = read_request({"messages": [*history, *results], "tools": [TOOL]})
    with pytest.raises(ValueError, match="single tool-calls"):
        splicer.continuation(request, 1, 0)
    with pytest.raises(ValueError, match="single tool-calls"):
        splicer.prompt(request)


@pytest.mark.fault("an agent's later turns are cut into tokens anew")
@pytest.mark.parametrize(("make", "examples"), VOCABULARIES)
def test_recorded_tokens_stay_whatever_the_text_would_be_cut_into(make, examples):
    """The answer is recorded in tokens that its text is never cut into; the next prompt has just these."""
    tokenizer, splicer = make(TEMPLATE, list(MARKS[:1]))
    end = tokenizer.convert_tokens_to_ids(MARKS[0])
    hello, then = {"role": "user", "content": "hello"}, {"role": "user", "content": "and then"}

    @settings(max_examples=2 * examples)
    @given(st.text(st.sampled_from("thecallinan "), min_size=1, max_size=20))
    def check(answer):
        single = [tokenizer.convert_tokens_to_ids("Ġ" if one == " " else one) for one in answer]
        prompt = splicer.prompt(read_request({"messages": [hello]}))
        sent = {"role": "assistant", "content": answer.strip()}
        added = splicer.continuation(read_request({"messages": [hello, sent, then]}), 1, end)
        said = {"role": "assistant", "content": answer}
        whole = splicer.prompt(read_request({"messages": [hello, said, then]}))
        assert tokenizer.decode([*prompt, *single, end, *added]) == tokenizer.decode(whole)

    check()


def test_the_first_end_behind_an_answer_counts_and_reasoning_that_comes_back_does_not():
    """Two messages behind one answer, of roles that both end it; and reasoning that is written behind an answer."""
    tokenizer, splicer = _splicer(ENDED_BY_ROLE, ["<|user|>", "<|tool|>"])
    after = [{"role": "tool", "content": "3"}, {"role": "user", "content": "and"}]
    history = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "x"}]
    found = splicer.continuation(read_request({"messages": [*history, *after]}), 1, 5)
    assert tokenizer.decode(found) == "<|tool|>3<|user|>and<|assistant|>"
    reasoning = "{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
    late = "{% for m in messages %}{{ m.content }}" + reasoning + "<|end|>{% endfor %}"
    tokenizer, splicer = _splicer(late, ["<|end|>"])
    history[1]["reasoning_content"] = "hm"
    found = splicer.continuation(read_request({"messages": [*history, after[1]]}), 1, 5)
    assert tokenizer.decode(found) == "<|end|>and<|end|>"


def test_a_template_that_changes_what_it_wrote_gives_no_continuation():
    """No end of a turn, an end that depends on what follows, and one that repeats the answer later."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "abc", strict=True)]
    request = read_request({"messages": messages})
    every = "{% for m in messages %}{{ m.content }}"
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        every + "{{ '<|end|>' if loop.last else '.<|end|>' }}{% endfor %}",
        every + "<|end|>{% endfor %}{{ messages[1].content if messages|length > 2 }}<|end|>",
    ):
        _, splicer = _splicer(template, ["<|end|>"])
        assert splicer.continuation(request, 1, 0) is None


def test_a_configuration_that_is_nested_too_deeply_names_no_end(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert end_tokens(str(tmp_path), None) == {}
