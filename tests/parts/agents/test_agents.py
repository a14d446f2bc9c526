"""Agents of users: commands and functions that play tasks, and those that hang, flood, fail or send garbage."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shlex
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import safetensors.torch
import structlog
from structlog.testing import capture_logs
from support.chat_model import write_chat_model
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.job_file import job_of, write_job
from support.jobs import ManualClock
from support.paths import ROOT
from support.readme import line_of, typed
from support.served_process import MINUTES, ServedProcess
from support.synchronizers import Threads, World

from explorer_hooks.cli.main import run as command_line
from explorer_hooks.parts.agents import agent_evaluation
from explorer_hooks.parts.agents.agent_evaluation import AgentEvaluator
from explorer_hooks.parts.agents.players import CommandPlayer, FunctionPlayer
from explorer_hooks.parts.agents.progress import EVERY, RolloutProgress
from explorer_hooks.parts.agents.run_agents import AgentThreads, run_agents
from explorer_hooks.parts.agents.schedule import AgentSchedule, ScheduleLimits
from explorer_hooks.parts.agents.serve import limits_of
from explorer_hooks.parts.agents.sessions import EQUAL
from explorer_hooks.parts.agents.tables import AgentSection
from explorer_hooks.parts.agents.turns import TurnMaker
from explorer_hooks.run.curriculum import DIFFICULTY, Curriculum
from explorer_hooks.run.held_out import HeldOut
from explorer_hooks.run.load import load_file
from explorer_hooks.run.own_files import EVALUATIONS, METRICS, Records, own_path
from explorer_hooks.run.rewards import Score
from explorer_hooks.run.scoring import BuiltInScorer, open_scorer
from explorer_hooks.tasks.sources import open_tasks
from explorer_hooks.tasks.task import Task
from syncd.errors import ConfigError, EngineDeadError
from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.jobfile.evaluation import EvaluationSet
from syncd.jobfile.explorer_sections import CurriculumSection, RewardSection
from syncd.jobfile.task_sets import TaskSetSection
from syncd.synchronizer import Synchronizer

ASK = """
import json, os, sys, time, urllib.error, urllib.request
task = json.loads(os.environ["SYNCD_TASK"])
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
KINDS = {
    "good": "print('hello'); print(json.dumps({'reward': len(ask(task['prompt'])), 'why': 'length'}))",
    "number": "ask('x'); print(0.5)",
    "lines": "ask('x'); print('hi'); print(json.dumps({'reward': 0.25, 'why': 'a\u2028b'}, ensure_ascii=False))",
    "hangs": "ask('x'); time.sleep(600)",
    "long": "ask('x'); print(json.dumps({'reward': 0.125, 'why': 'y' * 32_000}))",
    "floods": "ask('x'); sys.stdout.write('y' * (1 << 22)); sys.stderr.write('z' * (1 << 22)); print('\\n' + '1')",
    "garbage": "ask('x'); print('it went well')",
    "nan": "ask('x'); print('NaN')",
    "silent": "print(1)",
    "dies": "ask('x'); os.kill(os.getpid(), 9)",
    "raises": "ask('x'); raise RuntimeError('no idea')",
}


def player_of(code, timeout=60.0, *, has_reward=True, stop=lambda: False):
    return CommandPlayer(
        shlex.join([sys.executable, "-c", ASK + code]), timeout, has_reward=has_reward, stop=stop
    )


def played(
    tmp_path,
    player,
    *,
    tasks=1,
    size=1,
    retries=0,
    max_failures=99,
    judge=None,
    threads=2,
    more=(),
    say=lambda _: "abc",
    **limits,
):
    """Play each task once, with `more` in its line; return the bed, and why playing failed."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"task {n}", "answer": "abc", **dict(more)} for n in range(tasks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(None), group_size=size, **limits)
    bed.engine.say = lambda prompt: [*bed.ids(say(prompt)), 0]
    with bed.serving() as (_, http):
        limits = ScheduleLimits(1, retries, max_failures)
        tasks = open_tasks([TaskSetSection(source=str(path))])
        curriculum = Curriculum(CurriculumSection(), Records(str(tmp_path / "difficulty.jsonl")), "")
        schedule = AgentSchedule(bed.gateway, tasks, "seed", limits, lambda _: True, curriculum)
        agents = AgentThreads(schedule, player, judge, http, lambda: False)
        with agents.playing(threads):
            end = time.monotonic() + MINUTES
            while not agents.is_over() and agents.failure is None:
                assert time.monotonic() < end
                time.sleep(0.02)
    player.close()
    return bed, agents.failure


INFOS = {"good": {"why": "length"}, "lines": {"why": "a\u2028b"}, "long": {"why": "y" * 32_000}}


@pytest.mark.parametrize(
    ("kind", "reward"), [("good", 3.0), ("number", 0.5), ("floods", 1.0), ("lines", 0.25), ("long", 0.125)]
)
def test_a_command_plays_a_rollout_and_its_last_line_is_the_reward(tmp_path, kind, reward):
    bed, failure = played(tmp_path, player_of(KINDS[kind]), tasks=2, size=2)
    assert failure is None
    sessions = [one for group in bed.sessions.groups.values() for one in group.rollouts.values()]
    assert [(one.state, one.reward) for one in sessions] == [("rewarded", reward)] * 4
    assert set(bed.sessions.groups) == {"0.0", "0.1"}
    assert sessions[0].info == INFOS.get(kind, {})


def test_a_group_that_was_begun_is_played_although_the_trainer_needs_fewer_by_then(tmp_path):
    """The schedule finds room, and before the group's first session begins the service has made it less."""
    bed, failure = played(tmp_path, player_of(KINDS["number"]), groups=0)
    assert failure is None
    assert [group.rewards for group in bed.sessions.groups.values()] == [[0.5]]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hangs", "it took more than 2 s"),
        ("garbage", "its last line is no JSON: 'it went well'"),
        ("nan", "it returned nan"),
        ("silent", "no turn was recorded"),
        ("dies", "it ended with -9"),
        ("raises", "it ended with 1: RuntimeError: no idea"),
    ],
)
def test_an_agent_that_fails_is_tried_again_and_then_its_group_is_dropped_and_counted(tmp_path, kind, said):
    """After so many groups in a row the run ends, and says why."""
    player = player_of(KINDS[kind], 2.0 if kind == "hangs" else 60.0)
    bed, failure = played(tmp_path, player, tasks=3, retries=1, max_failures=2, threads=1)
    assert isinstance(failure, ConfigError)
    assert said in str(failure)
    assert bed.sessions.dropped == {"agent": 2}
    assert bed.sessions.over == {"0.0": "agent", "0.1": "agent"}
    assert list(bed.sessions.ended.values()) == ["abandoned"] * 4, "two attempts each"


LONGER = "\nwhile True: ask('and so on ' * (number := number + 20))"
"""Asks for more and more until it is refused, which ends it with an error."""


@pytest.mark.fault("a rollout that is as long as it may be is lost as a failure of its agent")
@pytest.mark.parametrize(
    ("limit", "why"), [({"max_turns": 2}, "turns"), ({"max_prompt_tokens": 300}, "context")], ids=str
)
def test_an_attempt_that_ends_at_a_limit_is_counted_as_that_and_not_tried_again(tmp_path, limit, why):
    """Each attempt gets the same answers, so it would end there again; and it is no failure that ends the run."""
    player = player_of(f"number = 0{LONGER}")
    bed, failure = played(tmp_path, player, tasks=2, retries=3, max_failures=1, threads=1, **limit)
    assert failure is None
    assert bed.sessions.dropped == {why: 2}
    assert list(bed.sessions.ended.values()) == ["abandoned"] * 2, "one attempt each"


def test_an_agent_that_fails_behind_a_limit_or_before_its_first_turn_has_failed(tmp_path):
    """It goes on with a shorter history and then raises; and one whose task alone is too long took no turn."""
    code = "ask('x')\ntry:\n    ask('y ' * 999)\nexcept urllib.error.HTTPError:\n    ask('z')\nask('no'[:no])"
    bed, failure = played(tmp_path / "a", player_of(code), max_prompt_tokens=300, max_failures=1)
    assert "name 'no' is not defined" in str(failure)
    assert bed.sessions.dropped == {"agent": 1}
    bed, failure = played(tmp_path / "b", player_of("ask('y ' * 999)"), max_prompt_tokens=300, max_failures=1)
    assert "HTTP Error 400" in str(failure)
    assert bed.sessions.dropped == {"agent": 1}


@pytest.mark.fault("a rollout that is as long as it may be is lost as a failure of its agent")
def test_the_agent_of_the_page_has_a_reward_also_at_a_limit(tmp_path):
    (tmp_path / "agent.py").write_text(page_block("`agent.py` beside"))
    call = '<tool_call>{"name": "look_up", "arguments": {"about": 1}}</tool_call>'
    player = FunctionPlayer("agent:run", MINUTES, 1, [str(tmp_path)])
    bed, failure = played(tmp_path / "bed", player, max_turns=2, threads=1, say=lambda _: call)
    assert failure is None
    (session,) = bed.sessions.groups["0.0"].rollouts.values()
    assert (len(session.turns), session.reward, session.attempt) == (2, 0.0, 0)


def schedule_of(tmp_path, bed, *, tasks=4, retries=0, max_failures=99):
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(tasks)))
    opened = open_tasks([TaskSetSection(source=str(tmp_path / "tasks.jsonl"))])
    curriculum = Curriculum(CurriculumSection(), Records(str(tmp_path / "difficulty.jsonl")), "")
    limits = ScheduleLimits(1, retries, max_failures)
    return AgentSchedule(bed.gateway, opened, None, limits, lambda _: True, curriculum)


def test_what_the_schedule_knows_of_failures_goes_with_their_groups(tmp_path):
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [7, 0]), group_size=2)

    async def main(bed):
        schedule = schedule_of(tmp_path, bed, retries=1)
        for at in range(8):  # all rollouts of three groups fail twice, those of the last one once
            one, other = [(await schedule.next())[0] for _ in range(2)]
            if at < 7:
                await schedule.failed(one, "no idea")
                await schedule.failed(other, "no idea")
                continue
            for attempt in (one, other):
                await bed.ask(attempt.session, [{"role": "user", "content": "x"}])
                await schedule.rewarded(attempt, 1.0, {})
        assert await schedule.is_over()
        return len(schedule._failures), dict(bed.sessions.dropped)

    assert bed.run(main) == (0, {"agent": 3})


def test_an_agent_that_ends_long_after_its_group_ends_no_run(tmp_path, monkeypatch):
    """By then the gateway has forgotten its session: it knows how the last ten thousand ended."""
    monkeypatch.setattr("explorer_hooks.parts.agents.sessions.MOST_ENDED", 0)
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [7, 0]), group_size=2)

    async def main(bed):
        schedule = schedule_of(tmp_path, bed, tasks=1)
        (one,), (other,) = await schedule.next(), await schedule.next()
        assert not await schedule.has_ended(other)
        await schedule.failed(one, "no idea")
        assert await schedule.has_ended(other)
        await schedule.failed(other, "it took more than 600 s")
        return await schedule.is_over(), dict(bed.sessions.dropped)

    assert bed.run(main) == (True, {"agent": 1})


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "equal"])
def test_a_group_that_is_done_before_its_last_agent_ends_ends_a_row_of_dropped_ones(tmp_path, is_written):
    """The agents give their rewards by HTTP, and go on for a while: to close a browser, for example."""
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [7, 0]), group_size=1)

    async def main(bed):
        schedule = schedule_of(tmp_path, bed, max_failures=2)
        for number in range(4):
            (attempt,) = await schedule.next()
            if number % 2:
                await schedule.failed(attempt, "no idea")
                continue
            await bed.ask(attempt.session, [{"role": "user", "content": "x"}])
            await bed.gateway.reward(attempt.session, {"reward": 1.0})
            if is_written:
                await bed.gateway.begin_batch(1 + number, [attempt.group])
                await bed.gateway.end_batch([attempt.group])
            else:
                await bed.gateway.drop(attempt.group, EQUAL)
            assert await schedule.has_ended(attempt)
        return await schedule.is_over()

    assert bed.run(main)


@pytest.mark.parametrize("agent", [True, False], ids=["run", "serve"])
def test_a_slow_tool_is_not_taken_for_an_idle_group_where_the_explorer_plays_it(tmp_path, agent):
    """`explorer run` bounds each attempt itself, by `explorer.agent.timeout`, however long that is."""
    played = {"agent": {"command": "true", "timeout": 7200}} if agent else {}
    explorer = {"tasks": "t", "gateway": {"idle": 0.001}} | played
    job = job_of(data={"groups": 1, "group_size": 1}, explorer=explorer)
    path = write_job(tmp_path / "job.toml", job)
    limits = dataclasses.asdict(limits_of(load_file(path)))
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [7, 0]), **limits)

    async def main(bed):
        await bed.ask(await bed.session(), [{"role": "user", "content": "x"}])
        await asyncio.sleep(0.01)  # the tool
        await bed.gateway.drop_idle()
        return bed.sessions.over

    assert bed.run(main) == ({} if agent else {"g": "idle"})


def test_a_reward_function_reads_the_last_answer(tmp_path):
    player = player_of("ask('x'); print('nothing that matters')", has_reward=False)
    bed, failure = played(tmp_path, player, judge=BuiltInScorer("exact_match"))
    assert failure is None
    assert [one.reward for group in bed.sessions.groups.values() for one in group.rollouts.values()] == [1.0]


HTTP = """
def reward(body, key="any"):
    headers = {"Authorization": f"Bearer {key}"}
    data = json.dumps(body).encode()
    try:
        url = os.environ["OPENAI_BASE_URL"] + "/reward"
        return urllib.request.urlopen(urllib.request.Request(url, data, headers)).status
    except urllib.error.HTTPError as error:
        return error.code
"""


def test_an_agent_gives_its_reward_by_http_and_the_first_one_counts_however_it_ends(tmp_path):
    """It ends with an error after the call, and what it printed before is no reward."""
    player = player_of(
        HTTP + "early = reward({'reward': 1})\n"
        "ask('x'); ask('y')\n"
        "said = [early, reward({'reward': 3, 'turn_rewards': [1, 1]})]\n"
        "said.append(reward({'reward': 2, 'turn_rewards': [1.5, 0.5]}))\n"
        "said.append(reward({'reward': 7}))\n"
        "open(task['id'], 'w').write(json.dumps(said))\n"
        "print(5); raise RuntimeError('no idea')"
    )
    tasks = tmp_path / "said"
    bed, failure = played(tmp_path, player, agents_reward=True, more={"id": str(tasks)})
    assert failure is None
    (session,) = bed.sessions.groups["0.0"].rollouts.values()
    assert (session.reward, session.turn_rewards, session.attempt) == (2.0, [1.5, 0.5], 0)
    assert json.loads(tasks.read_text()) == [409, 400, 200, 200]


def test_an_agent_may_not_give_a_reward_by_http_where_others_do(tmp_path):
    code = HTTP + "ask('x'); print(reward({'reward': 1}))"
    bed, failure = played(tmp_path, player_of(code))
    assert failure is None
    (session,) = bed.sessions.groups["0.0"].rollouts.values()
    assert session.reward == 400.0


def test_an_agent_says_the_rewards_of_its_turns_and_wrong_ones_are_a_failed_attempt(tmp_path):
    code = "ask('x'); ask('y'); print(json.dumps({'reward': 1, 'turn_rewards': [0.25, 0.75], 'why': 'so'}))"
    bed, failure = played(tmp_path / "good", player_of(code))
    assert failure is None
    (session,) = bed.sessions.groups["0.0"].rollouts.values()
    assert (session.turn_rewards, session.info) == ([0.25, 0.75], {"why": "so"})
    bed, failure = played(tmp_path / "bad", player_of(code.replace("0.25, ", "")), max_failures=1)
    assert "turn_rewards has 1 rewards, and the session 2 turns" in str(failure)


REWARDS = """
import math, os, time
def reward(prompt, response, task):
    number = int(prompt.split()[-1])
    if number == 0:
        raise RuntimeError("no idea")
    if number == 1:
        time.sleep(600)
    if number == 2:
        os._exit(1)
    return ["very good", math.nan, math.inf, None, [1.0], {"reward": "high"}, 0.5][number - 3]
"""


def test_rewards_that_raise_hang_die_or_are_none_cost_their_groups_alone_and_are_counted(tmp_path):
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    section = RewardSection(function="bad_rewards:reward", timeout=3.0, workers=2)
    judge = open_scorer(section, [str(tmp_path)])
    player = player_of("ask('x')", has_reward=False)
    with structlog.testing.capture_logs() as logs, contextlib.closing(judge):
        bed, failure = played(tmp_path, player, tasks=10, judge=judge)
    assert failure is None
    assert bed.sessions.dropped == {"reward": 9}
    problems = " ".join(one["problem"] for one in logs if one["event"] == "attempt_failed")
    for said in (
        "no idea",
        "more than 3 s",
        "its process ended with",
        "returned str",
        "nan",
        "inf",
        "NoneType",
        "list",
    ):
        assert said in problems
    (group,) = bed.sessions.groups.values()
    assert group.rollouts[0].reward == 0.5


def test_a_function_plays_in_a_process_that_is_replaced_if_it_hangs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import openai, time\n"
        "def run(base_url, api_key, task):\n"
        "    client = openai.OpenAI(base_url=base_url, api_key=api_key)\n"
        "    client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}])\n"
        "    if api_key[0] in '0123':\n"
        "        time.sleep(600)\n"
        "    return {'reward': 1, 'task': task['prompt']}\n"
    )
    player = FunctionPlayer("mine:run", 3.0, 2, [str(tmp_path)])
    bed, failure = played(tmp_path, player, tasks=2, size=2, retries=20)
    assert failure is None
    sessions = [one for group in bed.sessions.groups.values() for one in group.rollouts.values()]
    assert [(one.state, one.info["task"][:4]) for one in sessions] == [("rewarded", "task")] * 4
    assert all(one.id[0] not in "0123" for one in sessions), "nothing of a killed attempt is left"


def test_the_log_says_how_many_rollouts_have_ended_while_a_batch_is_played(tmp_path):
    bed, clock = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [7, 0]), group_size=3), ManualClock()

    async def begin(bed):
        for rollout in range(3):
            session = await bed.session("0.0", rollout)
            for _ in range(rollout):
                await bed.ask(session, [{"role": "user", "content": "x"}])
            if rollout == 1:
                await bed.gateway.reward(session, {"reward": 1.0})
        await bed.session("0.1", 0)
        await bed.gateway.drop("0.1", "agent")

    with bed.serving() as (_, http), capture_logs() as logs:
        progress = RolloutProgress(bed.gateway, http, 6, clock.monotonic)
        http.call(begin(bed))
        progress.show()
        for _ in range(3):
            clock.sleep(EVERY)
            progress.show()
            progress.show()
            clock.sleep(EVERY / 2)
            progress.restart()  # a batch was written
    lines = [line for line in logs if line["event"] == "rollouts_played"]
    wanted = {"needed": 6, "ended": 1, "playing": 2, "turns": 2, "dropped_groups": 1}
    assert [{name: line[name] for name in wanted} for line in lines] == [wanted] * 3


def test_a_stopped_explorer_kills_its_agents(tmp_path):
    stop = threading.Event()
    thread, number = sleeping(tmp_path, player_of(SLEEPS, stop=stop.is_set))
    stop.set()
    thread.join(MINUTES)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_an_explorer_that_ends_without_a_signal_kills_its_agents(tmp_path):
    player = player_of("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPS)
    thread, number = sleeping(tmp_path, player)
    player.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    thread.join(MINUTES)


SLEEPS = "open(task['prompt'], 'w').write(str(os.getpid())); time.sleep(600)"


def sleeping(tmp_path, player):
    """Return the thread in which a player plays one that sleeps, and the number of its process."""
    note = tmp_path / "pid"
    thread = threading.Thread(target=player.play, args=("http://127.0.0.1:9", "x", {"prompt": str(note)}))
    thread.start()
    while not note.exists() or not note.read_text():
        time.sleep(0.02)
    return thread, int(note.read_text())


def page_block(after):
    """Return the indented text that follows a line of the tutorial about agents."""
    page = (ROOT / "docs/tutorial-agent.md").read_text()
    assert after in page
    lines = page.partition(after)[2].partition("\n\n")[2].splitlines()
    end = next(at for at, line in enumerate(lines) if line and not line.startswith(" "))
    return textwrap.dedent("\n".join(lines[:end]))


def test_the_agent_of_the_page_is_twenty_lines_and_plays_in_the_job_that_the_page_begins_with(
    tmp_path, capsys
):
    place = tmp_path / "mine"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make = line_of("python examples/calculator/make.py base")
    typed(f"{make} --conversations 500 && {line_of('syncd init mine')}", tmp_path)
    agent, table, job = (
        page_block("`agent.py` beside"),
        page_block("`job.toml`, take `[explorer.reward]` out"),
        place / "job.toml",
    )
    assert len([line for line in agent.splitlines() if line]) <= 20
    (place / "agent.py").write_text(agent)
    text = job.read_text()
    job.write_text(text + table)
    assert command_line(["run", str(job), "--dry-run"]) == 78, "the page says to take [explorer.reward] out"
    assert (
        "explorer.reward.function has no effect where the agent gives its reward" in capsys.readouterr().err
    )
    reward = next(part for part in text.split("\n\n") if part.startswith("[explorer.reward]"))
    job.write_text(text.replace(reward, "") + table)
    assert command_line(["run", str(job), "--dry-run"]) == 0
    call = '<tool_call>{"name": "look_up", "arguments": {"about": 1}}</tool_call>'
    said = iter([call, "it is abc", "I do not know"])
    player = FunctionPlayer("agent:run", MINUTES, 1, [str(place)])
    bed, failure = played(tmp_path / "bed", player, size=2, threads=1, say=lambda _: next(said))
    assert failure is None
    sessions = bed.sessions.groups["0.0"].rollouts.values()
    assert [(len(one.turns), one.reward) for one in sessions] == [(2, 1.0), (1, 0.0)]
    told = bed.tokenizer.decode(bed.engine.prompts[1])
    assert 'there is nothing about {"about": 1}' in told


KILLS = int(os.environ.get("SYNCD_KILLS", "1"))
TASKS = 6 * KILLS


@pytest.fixture
def job(tmp_path):
    """Return a job's file with the example agent and a model of its own, and its world."""
    os.mkdir(tmp_path / "job")
    write_chat_model(tmp_path / "model")
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "id": f"sum-{n}"} for n in range(TASKS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text((ROOT / "examples" / "agents" / "agent.py").read_text())
    path = tmp_path / "job.toml"
    explorer = {
        "tasks": "tasks.jsonl",
        "epochs": 1,
        "ahead": 1000,
        "sampling": {"max_tokens": 8},
        "agent": {"function": "agent:run", "concurrency": 4},
        "gateway": {"directory": "state"},
    }
    data = {"groups": 2, "group_size": 2}
    write_job(path, job_of(data=data, sync={"timeout": 600}, explorer=explorer))
    world = World(tmp_path / "job", Threads())
    world.run()
    yield path, world
    world.shut()


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_the_example_agent_plays_each_task_once_although_the_explorer_is_killed(job):
    """Killed at any instant after some turns: while agents play, while a batch is written, while the journal is."""
    file, world = job
    chance = random.Random(KILLS)
    with Synchronizer.open(world.root, "trainer", timeout=MINUTES), contextlib.ExitStack() as ended:
        process = ServedProcess(file, "run")
        ended.callback(process.end)
        for _ in range(KILLS):
            _await_turns(process, file.parent / "state" / "journal.jsonl", chance.randrange(1, 14))
            time.sleep(chance.random() / 10)
            process.kill()
            process.start()
        assert process.wait() == 0, process.said
    assert "explorer ended: all tasks are done\n" in process.said
    paths = [
        batch_paths.batch(world.job, "e0", number)
        for number in sorted(batch_paths.numbers(world.job, batch_paths.batches(world.job, "e0")))
    ]
    rows = [row for path in paths for row in decode_batch(world.job.disk.read(path, 1 << 28), path)]
    places = [(f"sum-{number}", rollout) for number in range(TASKS) for rollout in range(2)]
    assert sorted((row.task, row.rollout) for row in rows) == sorted(places)
    assert len({row.group for row in rows}) == TASKS
    assert {(row.segments, row.info["turns"]) for row in rows} == {(1, 2)}
    assert command_line(["run", str(file), "--name", "e0", "--explorer.shuffle", "false"]) == 78


def _await_turns(process, journal, count):
    """Wait until the process has recorded so many turns, or has ended."""
    end = time.monotonic() + MINUTES
    has_begun, before = False, 0
    while process.process.poll() is None:
        has_begun = has_begun or any("gateway_serving" in line for line in process.said)
        now = journal.read_text().count('"kind":"turn"') if has_begun else 0
        before = before or now
        if has_begun and now >= before + count:
            return
        assert time.monotonic() < end, process.said
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--explorer.agent.command", "true"], "has a command and a function"),
        (
            ["--explorer.gateway.segments", "last", "--algorithm.turn_rewards", "true"],
            "leaves turns out, whose rewards",
        ),
        (["--explorer.agent.function", "agent"], "is not package.module:function"),
        (["--explorer.agent.reward", "function"], "returns the reward"),
        (
            ["--explorer.agent.function", "", "--explorer.agent.retries", "3"],
            "needs explorer.agent.command or",
        ),
        (["--explorer.teacher.address", "http://127.0.0.1:1"], "asks no teacher"),
        (
            ["--explorer.evaluation.tasks", "tasks.jsonl", "--explorer.evaluation.reward", "math"],
            "the agent itself gives the rewards",
        ),
        (["--explorer.agent.function", "", "--explorer.agent.command", "a 'b"], "is no command"),
    ],
)
def test_what_does_not_go_together_with_an_agent_is_an_error_before_anything_is_opened(
    job, capsys, more, said
):
    assert command_line(["run", str(job[0]), "--name", "e0", *more]) == 78
    assert said in capsys.readouterr().err
    assert command_line(["serve", str(job[0]), "--name", "e0"]) == 78
    assert "explorer serve starts no agent" in capsys.readouterr().err


NOTING = """
import openai, random

def run(base_url, api_key, task):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    history = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=history).choices[0].message
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
    reward = random.choice([0.0, 0.5, 1.0])
    with open("NOTES", "a") as notes:
        notes.write(f"{task['id']} {reward}\\n")
    return reward
"""


@pytest.mark.slow
def test_agents_play_evaluation_sets_of_which_nothing_is_trained(job):
    file, world = job
    place = file.parent
    (place / "agent.py").write_text(NOTING.replace("NOTES", f"{place}/notes"))
    rows = [{"prompt": f"Held {n}?", "id": f"held-{n}"} for n in range(3)]
    (place / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = file.read_text().replace("epochs = 1", 'epochs = 1\nname = "e0"')
    file.write_text(
        f'{text}[explorer.evaluation.sets.held]\ntasks = "held.jsonl"\nsamples = 4\n'
        "temperature = 0.8\ncorrect = 0.5\nk = [2]\nmax_tokens = 6\n"
    )
    with Synchronizer.open(world.root, "trainer", timeout=MINUTES) as trainer:
        state = safetensors.torch.load_file(place / "model" / "model.safetensors")
        trainer.set_model_state_dict(state, 3)
        trainer.wait_for(lambda: trainer.latest_version() is not None)
        assert run_agents(load_file(str(file))) == "all tasks are done"
    (line,) = Records(own_path(world.job, "e0", EVALUATIONS)).all()
    notes = [note.split() for note in (place / "notes").read_text().splitlines()]
    played = [[float(reward) for name, reward in notes if name == f"held-{n}"] for n in range(3)]
    assert [len(one) for one in played] == [4, 4, 4]
    pairs = [pair for one in played for pair in itertools.combinations(one, 2)]
    assert (line["set"], line["generation"], line["step"], line["tasks"]) == ("held", 1, 3, 3)
    assert line["reward"] == pytest.approx(sum(map(sum, played)) / 12)
    assert line["best_at_2"] == pytest.approx(sum(map(max, pairs)) / len(pairs))
    assert line["pass_at_2"] == pytest.approx(sum(max(pair) >= 0.5 for pair in pairs) / len(pairs))
    assert 0 < line["tokens"] <= 6 * 2 * 12
    numbers = sorted(batch_paths.numbers(world.job, batch_paths.batches(world.job, "e0")))
    paths = [batch_paths.batch(world.job, "e0", number) for number in numbers]
    rows = [row for path in paths for row in decode_batch(world.job.disk.read(path, 1 << 28), path)]
    assert {row.task for row in rows} == {f"sum-{n}" for n in range(TASKS)}, "nothing that was held out"
    assert len(rows) == 2 * TASKS


@pytest.mark.parametrize("is_dead", [False, True], ids=["away", "dead"])
def test_an_evaluation_ends_once_a_turn_has_waited_in_vain_for_the_engine(tmp_path, monkeypatch, is_dead):
    """Else each rollout would wait as long, while nobody follows the job, and what failed would be a figure."""
    bed, asked = GatewayBed(tmp_path / "state", ScriptedEngine(lambda _: [])), []

    class Patient:
        """Asks once, and then hangs as an agent may that tries again."""

        def play(self, url, sessions, _):
            asked.extend(sessions)
            body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"{url}/s/{sessions[0]}/v1/chat/completions", body).close()
            ended.wait(MINUTES)
            return [Score(None, problem="the engine is away")]

    def maker(*_):
        made = TurnMaker(ScriptedEngine(lambda _: []), threads=1, rows=1, hold=0.3, temperature=1.0)
        made.failure = EngineDeadError("it is dead") if is_dead else None
        return made

    ended = threading.Event()
    monkeypatch.setattr(agent_evaluation, "open_maker", maker)
    followed = SimpleNamespace(follower=SimpleNamespace(health=lambda **_: (True, {})))
    parts = SimpleNamespace(
        gateway=bed.gateway, followed=followed, tokens=None, versions=None, stop=lambda: False
    )
    tasks = [Task(f"held-{n}", "x", None, {}) for n in range(9)]
    held_out = HeldOut("held", EvaluationSet(tasks="t"), tasks, 8, BuiltInScorer("exact_match"), "key")
    evaluator = AgentEvaluator(parts, Patient(), AgentSection(command="true", concurrency=1))
    try:
        if is_dead:
            with pytest.raises(EngineDeadError):
                evaluator.outcomes(held_out, (1, 3))
        else:
            assert evaluator.outcomes(held_out, (1, 3)) is None
    finally:
        ended.set()
        bed.close()
    assert len(asked) == 1


@pytest.mark.slow
def test_groups_of_equal_rewards_are_dropped_and_solved_tasks_left_out(job):
    """Tasks of an even number are always solved; the others are worth something else each time."""
    file, world = job
    code = "ask(task['prompt']); import random; print(1 if int(task['id']) % 2 == 0 else random.random())"
    command = shlex.join([sys.executable, "-c", ASK + code])
    text = file.read_text().replace('function = "agent:run"', f"command = {json.dumps(command)}")
    file.write_text(text.replace("epochs = 1", 'epochs = 5\nname = "e0"'))
    rows = [{"prompt": "x", "id": str(number)} for number in range(4)]
    (file.parent / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--explorer.reward.equal_groups=drop", "--explorer.curriculum.enabled=true"]
    with Synchronizer.open(world.root, "trainer", timeout=MINUTES):
        assert run_agents(load_file(str(file), keys)) == "all tasks are done"
    numbers = sorted(batch_paths.numbers(world.job, batch_paths.batches(world.job, "e0")))
    paths = [batch_paths.batch(world.job, "e0", number) for number in numbers]
    written = [row for path in paths for row in decode_batch(world.job.disk.read(path, 1 << 28), path)]
    assert {row.task for row in written} == {"1", "3"}
    groups = {row.group for row in written}
    lines = Records(own_path(world.job, "e0", METRICS)).all()
    measured = [
        one for line in Records(own_path(world.job, "e0", DIFFICULTY)).all() for one in line["rewards"]
    ]
    solved = [task for task, mean in measured if task in "02"]
    assert len(measured) == len(groups) + len(solved)
    # Both were played in the first epoch. Of the 20 places of all epochs most of theirs were left out.
    assert 2 <= len(solved) <= 7
    dropped, skipped = (
        sum(line["dropped"].get("equal", 0) for line in lines),
        sum(line["skipped"] for line in lines),
    )
    assert 0 < dropped <= len(solved)
    assert sum(row.info.get("equal_dropped", 0) for row in written) == pytest.approx(dropped)
    # What came behind the last batch is in no line.
    assert 0 < skipped <= 20 - len(groups) - len(solved)
