"""Environments of a real verifiers: its tasks, tools and rewards, whole groups, and those that misbehave."""

import json
import os
import subprocess
import time

import pytest
from support.engine_process import python_of
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.paths import ROOT, TESTS
from support.served_process import MINUTES

from explorer_hooks.parts.agents import environment_process, verifiers_worker
from explorer_hooks.parts.agents.environment import EnvironmentPlayer
from explorer_hooks.parts.agents.environment_process import EnvironmentSettings
from explorer_hooks.parts.agents.rows import experiences_of
from explorer_hooks.parts.agents.run_agents import AgentThreads
from explorer_hooks.parts.agents.schedule import AgentSchedule, ScheduleLimits
from explorer_hooks.run.curriculum import Curriculum
from explorer_hooks.run.own_files import Records
from syncd.jobfile.explorer_sections import CurriculumSection

pytestmark = pytest.mark.slow

PYTHON = python_of("SYNCD_VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
DIRECTORIES = [str(ROOT / "examples" / "environments"), f"{TESTS}/parts/agents/programs"]
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "59*15"}}</tool_call>'


def player_of(name, timeout=60.0, options=None, **select):
    settings = EnvironmentSettings(name, options or {}, select, PYTHON, DIRECTORIES)
    return EnvironmentPlayer(settings, timeout, 1, "policy", lambda: False)


def played(tmp_path, player, say, *, size=2, whole=False, threads=4):
    """Play each task once; return the bed. `say` returns the text that follows the text of a prompt."""
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(None), group_size=size, max_tokens=200)
    bed.engine.say = lambda prompt: [*bed.ids(say(bed.tokenizer.decode(prompt))), 0]
    try:
        with bed.serving() as (_, http):
            limits = ScheduleLimits(1, 0, 99, whole)
            curriculum = Curriculum(CurriculumSection(), Records(str(tmp_path / "difficulty.jsonl")), "")
            schedule = AgentSchedule(bed.gateway, player.tasks, None, limits, lambda _: True, curriculum)
            agents = AgentThreads(schedule, player, None, http, lambda: False)
            with agents.playing(threads):
                end = time.monotonic() + 2 * MINUTES
                while not agents.is_over() and agents.failure is None:
                    assert time.monotonic() < end
                    time.sleep(0.05)
        assert agents.failure is None
    finally:
        player.close()
    return bed


def rollouts(bed):
    groups = sorted(bed.sessions.groups.items())
    return [[one for _, one in sorted(group.rollouts.items())] for _, group in groups]


def test_a_single_turn_has_the_environments_tasks_and_rewards(tmp_path):
    player = player_of("sums", limit=3)
    assert [task.id for task in player.tasks] == ["0+0", "0+1", "0+2"]
    bed = played(tmp_path, player, lambda _: "1")
    found = [[(one.task, one.reward, one.info) for one in group] for group in rollouts(bed)]
    info = [{"right": right, "is_number": 1.0} for right in (0.0, 1.0, 0.0)]
    assert found == [[(f"0+{at}", float(at == 1), info[at])] * 2 for at in range(3)]


def test_a_tools_answer_is_in_the_rollout_and_is_not_learnt(tmp_path):
    player = player_of("calculator", limit=1)
    bed = played(tmp_path, player, lambda text: "885" if "<|tool|>885" in text else CALL)
    [group] = bed.sessions.groups.values()
    rows = experiences_of(group, "g", 0.0)
    assert [(row.segments, row.reward, row.info["score"]) for row in rows] == [
        (1, 1.0, {"right": 1.0, "called": 1.0})
    ] * 2
    for row in rows:
        response = row.tokens[row.prompt_length :]
        learnt = [token for token, is_learnt in zip(response, row.action_mask, strict=True) if is_learnt]
        assert bed.tokenizer.decode(learnt) == f"{CALL}<|end|>885<|end|>"
        assert "<|tool|>885<|end|>" in bed.tokenizer.decode(response)


def test_an_episode_that_is_a_group_gives_each_rollout_its_own_reward(tmp_path):
    player = player_of("ranked+sums", options={"attempts": 3}, include={"names": ["7+8"]})
    answers = iter(["15", "14", "3"])
    bed = played(tmp_path, player, lambda _: next(answers), size=3, whole=True)
    [group] = rollouts(bed)
    by_answer = {one.turns[0].answer.content: (one.reward, one.info["right"]) for one in group}
    assert by_answer == {"15": (1.0, 1.0), "14": (0.5, 0.0), "3": (0.0, 0.0)}
    assert [len(one.turns) for one in group] == [1, 1, 1]


def test_an_environment_without_a_harness_plays_with_verifiers_own_chat_loop(tmp_path, capsys):
    bed = played(tmp_path, player_of("bare_tasks"), lambda _: "hello", size=1)
    if "failed to prepare uv script" in capsys.readouterr().out:
        pytest.skip("uv cannot install what verifiers' chat loop needs")
    [[one]] = rollouts(bed)
    assert (one.task, one.reward, one.info) == ("task-0", 5.0, {"length": 5.0})
    assert "be brief" in bed.tokenizer.decode(list(one.turns[0].prompt))


def test_what_an_environment_does_wrong_costs_the_attempt_and_never_makes_up_a_reward(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(environment_process, "GRACE", 3.0)
    names = ("good", "raises", "hangs", "nan", "no_reward", "dies", "blocks")
    bed = played(
        tmp_path, player_of("misbehaving", 5.0, include={"names": names}), lambda _: "x", size=1, threads=1
    )
    assert [(one.task, one.reward) for [one] in rollouts(bed)] == [("good", 0.25)]
    assert list(bed.sessions.over.values()) == ["agent"] * (len(names) - 1)
    log = capsys.readouterr().out
    for said in (
        "TaskError: ",
        "no idea",
        "it took more than 5 s'",
        "it returned nan",
        "it gave no reward",
        "its process ended with 3",
        "it took more than 5 s, and its process was killed",
    ):
        assert said in log, said


def test_roles_that_are_not_trained_and_traces_too_many_are_refused(tmp_path, capsys):
    names = ("good", "silent", "untrained", "two")
    player = player_of(
        "misplayed+misbehaving", options={"judge": {"model": "other"}}, include={"names": names}
    )
    bed = played(tmp_path, player, lambda _: "x", size=1)
    assert [one.task for [one] in rollouts(bed)] == ["good"]
    log = capsys.readouterr().out
    assert "ran no agent" in log
    assert "its role judge is not trained, and has no endpoint of its own" in log
    assert "it made 2 traces that are trained where 1 are expected" in log


def asked(environment, options=None, **select):
    return json.dumps({"environment": environment, "options": options or {}, "select": select})


def test_what_needs_more_than_this_host_is_refused_when_it_is_loaded():
    asks = {
        asked("sums", limit=2): "",
        asked("bare_tasks"): "",
        asked("best-of-n+sums", {"n": 4}, limit=1): "",
        asked("sums", {"agent": {"runtime": {"type": "docker"}}}): "options.agent.runtime.type = 'docker'",
        asked("sums", {"agent": {"harness": {"id": "codex"}}}): "the harness codex, which needs a container",
        asked(
            "sums", {"agent": {"retries": {"max_retries": 2}}}
        ): "options.agent.retries: the explorer tries again",
        asked("sums", {"taskset": {"nonsense": 1}}): "ValidationError",
        asked("misbehaving", {"taskset": {"image": "ubuntu"}}): "task good needs a container",
        asked("misbehaving", {"taskset": {"endless": True}}): "tasks without end",
        asked("sums", include={"names": ["none"]}): "it has no task",
        asked("nowhere"): "'nowhere' not found",
    }
    program = [
        PYTHON,
        "-P",
        f"{TESTS}/support/environment_asks.py",
        os.path.dirname(verifiers_worker.__file__),
    ]
    path = os.pathsep.join([os.path.dirname(PYTHON), os.environ["PATH"]])  # of uv
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(DIRECTORIES), "PATH": path}
    done = subprocess.run(
        [*program, *asks], env=environment, capture_output=True, text=True, timeout=MINUTES, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asks), done.stderr
    assert answers[0] == {"tasks": 2, "roles": {"agent": ["sums", "subprocess"]}}
    assert answers[1] == {"tasks": 1, "roles": {"agent": ["null", "subprocess"]}}
    assert answers[2] == {"tasks": 1, "roles": {"agent": ["sums", "subprocess"]}}
    for answer, said in zip(answers[3:], list(asks.values())[3:], strict=True):
        assert said in answer["problem"]
