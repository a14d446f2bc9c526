"""What an agent's tools can reach and say: no secret of the explorer, no answer, no reward out of range."""

import json
import os
import shlex
import sys
from contextlib import closing

import pytest

pytest.importorskip("starlette", reason="the gateway needs starlette")

from test_agents import ASK, HTTP, played

from explorer_hooks.parts.agents.agent_variables import agent_environment
from explorer_hooks.parts.agents.players import CommandPlayer, FunctionPlayer
from explorer_hooks.parts.agents.serve import limits_of
from explorer_hooks.parts.agents.tables import AgentSection
from explorer_hooks.run.load import load_file
from syncd.errors import ConfigError


def player_of(code, **how):
    program = f"import os; os.environ.setdefault('SYNCD_TASK', '{{}}')\n{ASK}{code}"
    words = shlex.join([sys.executable, "-c", program])
    return CommandPlayer(words, 60.0, **{"has_reward": True, "stop": lambda: False, **how})


LOOK = """
import subprocess
told = sys.stdin.read()
tool = subprocess.run(["env", "-0"], capture_output=True, text=True, check=True).stdout
open(task["seen"], "w").write(json.dumps({"tool": tool, "told": told}))
ask("x"); print(0.5)
"""
"""An agent that starts a tool, and keeps what the tool finds in its environment."""


def seen(tmp_path, monkeypatch, **how):
    """Return the variables of a tool that an agent starts, and what the agent was told."""
    monkeypatch.setenv("WANDB_API_KEY", "the-secret")
    monkeypatch.setenv("TEAM_TOKEN", "another")
    path = tmp_path / "seen.json"
    _, failure = played(tmp_path, player_of(LOOK, **how), more={"seen": str(path)})
    assert failure is None
    found = json.loads(path.read_text())
    assert "the-secret" not in found["tool"]
    return dict(one.split("=", 1) for one in found["tool"].split("\0") if one), json.loads(found["told"])


def test_a_tool_sees_no_secret_and_no_answer(tmp_path, monkeypatch):
    variables, told = seen(tmp_path, monkeypatch)
    assert "answer" not in json.loads(variables["SYNCD_TASK"])
    assert "TEAM_TOKEN" not in variables
    assert variables["PATH"] == os.environ["PATH"]
    assert variables["OPENAI_BASE_URL"].endswith("/v1")
    assert told["answer"] == "abc", "who says the reward needs it"


def test_where_something_else_scores_the_agent_does_not_get_the_answer(tmp_path, monkeypatch):
    _, told = seen(tmp_path / "a", monkeypatch, has_reward=False)
    assert told == {name: told[name] for name in ("id", "prompt", "seen")}
    _, told = seen(tmp_path / "b", monkeypatch, has_reward=False, has_answer=True)
    assert told["answer"] == "abc"


def test_variables_that_the_job_names_are_passed(tmp_path, monkeypatch):
    variables, _ = seen(tmp_path, monkeypatch, passed=["TEAM_TOKEN"])
    assert variables["TEAM_TOKEN"] == "another"


def test_a_tool_of_a_function_sees_no_secret(tmp_path, monkeypatch):
    text = "import subprocess\ndef run(base_url, api_key, task):\n"
    text += "    seen = subprocess.run(['env'], capture_output=True, text=True).stdout.splitlines()\n"
    (tmp_path / "looks.py").write_text(f"{text}    return {{'reward': 1.0, 'seen': seen}}\n")
    monkeypatch.setenv("WANDB_API_KEY", "the-secret")
    monkeypatch.setenv("TEAM_TOKEN", "another")
    with closing(FunctionPlayer("looks:run", 60.0, 1, [str(tmp_path)], ["TEAM_TOKEN"])) as player:
        ((score,),) = [player.play("http://127.0.0.1:1", ["s"], {})]
    seen = dict(line.split("=", 1) for line in score.info["seen"] if "=" in line)
    assert score.reward == 1.0
    assert "WANDB_API_KEY" not in seen
    assert (seen["TEAM_TOKEN"], seen["PATH"]) == ("another", os.environ["PATH"])


def test_what_is_passed_is_a_list_of_what_goes_in():
    secrets = {
        "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x", "https_proxy": "http://u:p@proxy",
        "SSH_AUTH_SOCK": "/x", "SYNCD_SOMETHING": "x", "OPENAI_API_KEY": "x",
    }  # fmt: skip
    assert agent_environment({**secrets, "PATH": "/bin", "LC_ALL": "C"}) == {"PATH": "/bin", "LC_ALL": "C"}
    assert agent_environment(secrets, ["HF_TOKEN"]) == {"HF_TOKEN": "x"}


@pytest.mark.parametrize("size", [90_000, 140_000, 2_000_000])
def test_a_task_of_any_length_starts_a_command(tmp_path, size):
    code = "whole = json.loads(sys.stdin.read()); ask('x'); "
    code += "print(json.dumps({'reward': 1, 'length': len(whole['story']), 'variable': bool(task)}))"
    bed, failure = played(tmp_path, player_of(code), more={"story": "x" * size})
    assert failure is None
    (session,) = bed.sessions.groups["0.0"].rollouts.values()
    assert session.info == {"length": size, "variable": size < 100_000}


def test_an_agent_that_reads_nothing_is_not_waited_for(tmp_path):
    bed, failure = played(tmp_path, player_of("ask('x'); print(0.5)"), more={"story": "x" * 99_000})
    assert failure is None
    assert [group.rewards for group in bed.sessions.groups.values()] == [[0.5]]


def test_a_reward_out_of_range_is_refused_wherever_it_comes_from(tmp_path):
    code = HTTP + (
        "ask('x'); said = [reward({'reward': one}) for one in (1e18, -0.1, 1.1)]\n"
        "said += [reward({'reward': 1, 'turn_rewards': [1]}), reward({'reward': 0})]\n"
        "open(task['id'], 'w').write(json.dumps(said))"
    )
    said = tmp_path / "said"
    bed, failure = played(
        tmp_path, player_of(code), agents_reward=True, reward_range=(0.0, 1.0), more={"id": str(said)}
    )
    assert failure is None
    assert json.loads(said.read_text()) == [400, 400, 400, 200, 200]
    assert [group.rewards for group in bed.sessions.groups.values()] == [[1.0]], "the first good one counts"
    printed = player_of("ask('x'); print(1e18)")
    _, failure = played(tmp_path / "printed", printed, reward_range=(0.0, 1.0), max_failures=1)
    assert "1e+18 is outside of explorer.agent.reward_range = [0, 1]" in str(failure)


def test_the_reward_of_a_turn_is_no_larger_than_a_reward_may_be(tmp_path):
    code = "ask('x'); ask('y'); print(json.dumps({'reward': 1, 'turn_rewards': [-999, 1000]}))"
    _, failure = played(tmp_path, player_of(code), reward_range=(0.0, 1.0), max_failures=1)
    assert "the reward -999 is outside" in str(failure)


FILE = """
[job]
dir = "job"
[model]
path = "model"
[data]
group_size = 2
[explorer]
tasks = "tasks.jsonl"
[explorer.agent]
"""


def loaded(tmp_path, agent, tasks=True):
    text = FILE if tasks else FILE.replace('tasks = "tasks.jsonl"\n', "")
    (tmp_path / "job.toml").write_text(text + agent)
    return load_file(str(tmp_path / "job.toml"))


COMMAND, FUNCTION, ENVIRONMENT = (
    'command = "python agent.py"\n', 'function = "agent:play"\n', 'environment = "verifiers:sums"\n',
)  # fmt: skip


def test_rewards_are_bound_and_the_route_is_open_where_an_agent_scores_itself(tmp_path):
    def allowed(agent, *, tasks=True):
        limits = limits_of(loaded(tmp_path, agent, tasks))
        return limits.agents_reward, limits.reward_range

    free = (float("-inf"), float("inf"))
    assert AgentSection().reward_range == (0.0, 1.0)
    assert allowed(COMMAND) == allowed(FUNCTION) == (True, (0.0, 1.0))
    assert allowed(COMMAND + "reward_range = [-1, 2]\n") == (True, (-1.0, 2.0))
    assert allowed(COMMAND + "http_reward = false\n") == (False, (0.0, 1.0))
    assert allowed(COMMAND + 'reward = "function"\n') == (False, free)
    assert allowed(ENVIRONMENT, tasks=False) == (False, free), "an environment scores by functions of its own"
    assert allowed(f"{ENVIRONMENT}reward_range = [0, 2]\n", tasks=False) == (False, (0.0, 2.0))


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        (COMMAND + "reward_range = [1, 0]\n", "reward_range"),
        (COMMAND + "reward_range = [0, 1, 2]\n", "reward_range"),
        (COMMAND + 'reward = "function"\nhttp_reward = false\n', "http_reward"),
        (COMMAND + 'reward = "function"\nreward_range = [0, 2]\n', "reward_range"),
        (FUNCTION + 'answer = "agent"\n', "answer"),
        (ENVIRONMENT + "http_reward = false\n", "http_reward"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, agent, key):
    with pytest.raises(ConfigError, match=f"explorer.agent.{key}"):
        loaded(tmp_path, agent, tasks="environment" not in agent)
