"""Agents of users: commands and functions that play tasks, and those that hang, flood, fail or send garbage."""

import contextlib
import json
import os
import random
import shlex
import sys
import threading
import time

import pytest
from support.chat_model import write_chat_model
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.paths import ROOT
from support.served_process import MINUTES, ServedProcess
from support.synchronizers import Threads, World

from explorer_hooks.cli.main import run as command_line
from explorer_hooks.explorer.scoring import BuiltInScorer
from explorer_hooks.explorer.tasks import read_tasks
from explorer_hooks.gateway.players import CommandPlayer, FunctionPlayer
from explorer_hooks.gateway.run_agents import AgentThreads
from explorer_hooks.gateway.schedule import AgentSchedule, ScheduleLimits
from syncd.errors import ConfigError
from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.synchronizer import Synchronizer

ASK = """
import json, os, sys, time, urllib.request
task = json.loads(os.environ["SYNCD_TASK"])
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
KINDS = {
    "good": "print('hello'); print(json.dumps({'reward': len(ask(task['prompt'])), 'why': 'length'}))",
    "number": "ask('x'); print(0.5)",
    "hangs": "ask('x'); time.sleep(600)",
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


def played(tmp_path, player, *, tasks=1, size=1, retries=0, max_failures=99, judge=None, threads=2):
    """Play each task once; return the bed, and why playing failed."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"task {n}", "answer": "abc"}) + "\n" for n in range(tasks))
    )
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(None), group_size=size)
    bed.engine.say = lambda prompt: [*bed.ids("abc"), 0]
    with bed.serving() as (_, http):
        limits = ScheduleLimits(1, retries, max_failures)
        schedule = AgentSchedule(bed.gateway, read_tasks(str(path)), "seed", limits, lambda _: True)
        agents = AgentThreads(schedule, player, judge, http, lambda: False)
        with agents.playing(threads):
            end = time.monotonic() + MINUTES
            while not agents.is_over() and agents.failure is None:
                assert time.monotonic() < end
                time.sleep(0.02)
    player.close()
    return bed, agents.failure


@pytest.mark.parametrize(
    ("kind", "reward"), [("good", 3.0), ("number", 0.5), ("floods", 1.0)], ids=["good", "number", "floods"]
)
def test_a_command_plays_a_rollout_and_its_last_line_is_the_reward(tmp_path, kind, reward):
    bed, failure = played(tmp_path, player_of(KINDS[kind]), tasks=2, size=2)
    assert failure is None
    sessions = [one for group in bed.sessions.groups.values() for one in group.rollouts.values()]
    assert [(one.state, one.reward) for one in sessions] == [("rewarded", reward)] * 4
    assert set(bed.sessions.groups) == {"0.0", "0.1"}
    assert sessions[0].info == ({"why": "length"} if kind == "good" else {})


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


def test_a_reward_function_reads_the_last_answer(tmp_path):
    player = player_of("ask('x'); print('nothing that matters')", has_reward=False)
    bed, failure = played(tmp_path, player, judge=BuiltInScorer("exact_match"))
    assert failure is None
    assert [one.reward for group in bed.sessions.groups.values() for one in group.rollouts.values()] == [1.0]


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


def test_a_stopped_explorer_kills_its_agents(tmp_path):
    stop = threading.Event()
    player = player_of("open(task['prompt'], 'w').write(str(os.getpid())); time.sleep(600)", stop=stop.is_set)
    note = tmp_path / "pid"
    thread = threading.Thread(target=player.play, args=("http://127.0.0.1:9", "x", {"prompt": str(note)}))
    thread.start()
    while not note.exists() or not note.read_text():
        time.sleep(0.02)
    stop.set()
    thread.join(MINUTES)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


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
    path.write_text("""
[job]
dir = "job"
[model]
path = "model"
[data]
groups = 2
group_size = 2
[sync]
timeout = 600
[explorer]
tasks = "tasks.jsonl"
epochs = 1
ahead = 1000
[explorer.sampling]
max_tokens = 8
[explorer.agent]
function = "agent:run"
concurrency = 4
[explorer.gateway]
directory = "state"
""")
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
        (["--explorer.agent.function", "agent"], "is not package.module:function"),
        (["--explorer.agent.reward", "function"], "returns the reward"),
        (
            ["--explorer.agent.function", "", "--explorer.agent.retries", "3"],
            "needs explorer.agent.command or",
        ),
        (["--explorer.teacher.address", "http://127.0.0.1:1"], "asks no teacher"),
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
