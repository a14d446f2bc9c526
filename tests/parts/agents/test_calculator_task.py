"""The task of `make demo-agents`: what is imitated is what the gateway asks, the agent, and the demo's verdict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.paths import ROOT

from explorer_hooks.parts.agents.answers import AnswerParser
from explorer_hooks.parts.agents.chat import read_request
from explorer_hooks.parts.agents.splice import Splicer, end_tokens
from explorer_hooks.parts.agents.tool_formats import written_format
from explorer_hooks.run.tokens import TransformersTokens
from trainer.sampling import Encoder, load_tokenizer

CALCULATOR, DEMO = ROOT / "examples" / "calculator", ROOT / "examples" / "demo"
sys.path[:0] = [str(CALCULATOR), str(DEMO)]

import calculator_agent  # noqa: E402
from calculator_tasks import value  # noqa: E402
from summary import Explored, HeldOutReward, Summary  # noqa: E402

pytestmark = pytest.mark.slow
TASK = {"prompt": "What is 123 + 234?", "answer": "357"}
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a directory in which make.py has run, as a process."""
    directory = tmp_path_factory.mktemp("made")
    more = ["--seed", "3", "--conversations", "40", "--tasks", "10"]
    subprocess.run([sys.executable, f"{CALCULATOR}/make.py", str(directory), *more], check=True, timeout=200)
    return directory


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_what_is_imitated_are_the_tokens_that_the_gateway_asks_for_and_reads(made):
    """Of each demonstration: the prompt, and where it goes on after a tool, token by token; and the call in it."""
    model = str(made / "model")
    tokenizer, encode = load_tokenizer(model), Encoder(model, trust=False)
    ends = end_tokens(model, tokenizer)
    template = TransformersTokens(tokenizer)
    splicer = Splicer(template, ends)
    parser = AnswerParser(written_format(template, ends.values()), tokenizer.chat_template)
    rows, before = rows_of(made / "sft.jsonl"), ([], 0)
    for row in rows:
        *asked, answer = row["messages"]
        request = read_request({"messages": asked, "tools": row["tools"]})
        tokens, length = encode(row)
        assert splicer.prompt(request) == tokens[:length]
        assert tokens[-1] in ends
        if len(asked) > 1:
            assert [*before[0], *splicer.continuation(request, 1, before[0][-1])] == tokens[:length]
        said = parser.parse(tokenizer.decode(tokens[length:-1]), tools=row["tools"], is_whole=True)
        calls = [call["function"] for call in answer.get("tool_calls", ())]
        assert list(said.calls.values()) == [(call["name"], call["arguments"]) for call in calls]
        assert said.content == answer["content"]
        before = tokens, length
    assert 40 < len(rows) < 80
    assert all(
        value(task["prompt"][8:-1].replace(" ", "")) == task["answer"]
        for task in rows_of(made / "tasks.jsonl")
    )


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ([CALL % "123+234", "It is 357"], (1.0, 1.0)),
        ([CALL % "123+235", "It is 358"], (0.0, 1.0)),
        ([CALL % "x" + CALL % "123+234", "357"], (1.0, 1.0)),
        (["About 400"], (0.0, 0.0)),
        ([CALL % "123+234"] * 3, (0.0, 1.0)),
    ],
)
def test_the_agent_plays_with_its_tool_whatever_the_model_writes(tmp_path, answers, score):
    said = iter(answers)
    bed = GatewayBed(tmp_path, ScriptedEngine(None), group_size=1, max_tokens=400)
    bed.engine.say = lambda _: [*bed.ids(next(said)), 0]
    with bed.serving() as (driver, _):
        session = driver.session("g", 0)
        found = calculator_agent.run(session["base_url"], session["api_key"], TASK)
    assert (found["reward"], found["called"]) == score


@pytest.mark.parametrize(
    ("last", "least", "holds"), [(0.7, 0.2, True), (0.65, 0.2, False), (0.7, 0.3, False)]
)
def test_the_demo_holds_only_if_the_reward_has_risen_enough(last, least, holds):
    explored = Explored([(1, 1)], [1e-6], [0.1])
    rewards = [0.4, 0.5, 0.4, 0.5, 0.45, *[last] * 5]
    summary = Summary(rewards, [(1, 1)], [], 0, {}, 0, {"e0": explored}, least, {}, {})
    assert summary.problems == ([] if holds else [f"the reward did not rise by more than {least:g}"])


@pytest.mark.parametrize(
    ("held_out", "problem"),
    [
        (HeldOutReward(0.5, 0.03, 0.61, 0.04, 1), ""),  # two standard errors of the difference are 0.1
        (HeldOutReward(0.5, 0.03, 0.59, 0.04, 1), "did not rise beyond noise"),
        (HeldOutReward(0.5, 0.0, 0.9, 0.0, 0), "the last version was not measured"),
    ],
)
def test_the_demo_holds_only_if_the_held_out_reward_has_risen_beyond_noise(held_out, problem):
    explored = Explored([(1, 1)], [1e-6], [0.1])
    rewards = [0.4] * 5 + [0.7] * 5
    summary = Summary(rewards, [(1, 1)], [], 0, {}, 0, {"e0": explored}, 0.2, {}, {"greedy": held_out})
    assert [problem in text for text in summary.problems] == ([True] if problem else [])
