"""Environments as agents without verifiers: what is refused, groups that are played together, sessions by header."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.served_process import MINUTES
from support.synchronizers import eventually

from explorer_hooks.parts.agents import verifiers_worker
from explorer_hooks.parts.agents.environment import EnvironmentPlayer
from explorer_hooks.parts.agents.environment_process import EnvironmentSettings
from explorer_hooks.parts.agents.run_agents import AgentThreads, run_agents
from explorer_hooks.parts.agents.schedule import AgentSchedule, ScheduleLimits
from explorer_hooks.run.curriculum import Curriculum
from explorer_hooks.run.load import load_file
from explorer_hooks.run.own_files import Records
from explorer_hooks.run.rewards import Score
from explorer_hooks.tasks.order import NamedSet, Tasks
from explorer_hooks.tasks.task import ReadTasks, Task
from syncd.errors import ConfigError
from syncd.jobfile.explorer_sections import CurriculumSection

JOB = """
[job]
dir = "{dir}/job"
[model]
path = "{dir}/model"
[explorer]
{explorer}
[explorer.agent]
{agent}
"""
ENVIRONMENT = 'environment = "verifiers:sums"'


@pytest.mark.parametrize(
    ("agent", "explorer", "key"),
    [
        (ENVIRONMENT, 'tasks = "tasks.jsonl"', "explorer.tasks"),
        ('environment = "gym:sums"', "", "explorer.agent.environment"),
        ('environment = "verifiers:"', "", "explorer.agent.environment"),
        (f'{ENVIRONMENT}\nfunction = "agent:run"', "", "explorer.agent"),
        (f'{ENVIRONMENT}\nreward = "function"', "", "explorer.agent.reward"),
        (f'{ENVIRONMENT}\noptions.taskset.id = "other"', "", "explorer.agent.options"),
        ('command = "agent"\nselect.limit = 3', 'tasks = "tasks.jsonl"', "explorer.agent.select"),
        ('command = "agent"\nepisode = "group"', 'tasks = "tasks.jsonl"', "explorer.agent.episode"),
    ],
    ids=["tasks", "kind", "name", "two", "reward", "taskset", "select", "episode"],
)
def test_what_does_not_go_with_an_environment_is_refused(tmp_path, agent, explorer, key):
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(dir=tmp_path, agent=agent, explorer=explorer))
    with pytest.raises(ConfigError) as caught:
        load_file(str(path))
    assert key in str(caught.value)


def test_an_interpreter_without_verifiers_is_refused_with_what_to_install(tmp_path):
    (tmp_path / "verifiers.py").write_text("raise ImportError('not here')")
    settings = EnvironmentSettings("sums", {}, {}, sys.executable, [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"verifiers cannot be imported by .*: not here") as caught:
        EnvironmentPlayer(settings, 1.0, 1, "policy", lambda: False)
    assert "pip install verifiers==0.4.0 uv" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot start /no/python"):
        EnvironmentPlayer(
            EnvironmentSettings("sums", {}, {}, "/no/python", []), 1.0, 1, "policy", lambda: False
        )


LOADING = """#!/bin/sh
read asked
kill -TERM EXPLORER
read nothing
"""


def test_a_signal_while_an_environment_loads_is_no_fault_of_the_file(tmp_path):
    python, path = tmp_path / "python", tmp_path / "job.toml"
    python.write_text(LOADING.replace("EXPLORER", str(os.getpid())))
    python.chmod(0o700)
    agent = f'{ENVIRONMENT}\npython = "{python}"'
    path.write_text(JOB.format(dir=tmp_path, agent=agent, explorer=""))
    assert run_agents(load_file(str(path))) == "told to stop"


DYING = """#!/bin/sh
read asked
sleep 600 >/dev/null 2>&1 &
echo $! > SERVER
echo '{"tasks": [{"id": "a", "digest": "0"}]}'
read asked
kill -9 $$
"""


def test_what_a_process_has_started_ends_with_it_also_if_it_was_killed(tmp_path):
    python, server = tmp_path / "python", tmp_path / "server"
    python.write_text(DYING.replace("SERVER", str(server)))
    python.chmod(0o700)
    settings = EnvironmentSettings("sums", {}, {}, str(python), [])
    player = EnvironmentPlayer(settings, 60.0, 1, "policy", lambda: False)
    try:
        (score,) = player.play("http://127.0.0.1:9", ["session"], {"place": 0})
        assert "its process ended with -9" in score.problem
        eventually(lambda: not is_running(int(server.read_text())))
    finally:
        player.close()


NOISY = """#!/bin/sh
read asked
echo started >> STARTS
echo '{"tasks": [{"id": "a", "digest": "0"}]}'
read asked
echo LINE
sleep 600
"""


@pytest.mark.parametrize("line", ["a warning", "[1]"])
def test_a_process_that_writes_what_is_no_answer_is_replaced(tmp_path, line):
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(NOISY.replace("STARTS", str(starts)).replace("LINE", f"'{line}'"))
    python.chmod(0o700)
    settings = EnvironmentSettings("sums", {}, {}, str(python), [])
    player = EnvironmentPlayer(settings, MINUTES, 1, "policy", lambda: False)
    try:
        for count in (1, 2):
            (score,) = player.play("http://127.0.0.1:9", ["session"], {"place": 0})
            assert score.problem == f"its process wrote something that is no answer: {line!r}"
            assert len(starts.read_text().split()) == count
    finally:
        player.close()


ANSWERING = """#!/bin/sh
read asked
echo '{"tasks": [{"id": "a", "digest": "0"}]}'
while read asked; do
    echo "$asked" | sed 's/^{"id": \\([0-9]*\\),.*/{"id": \\1, ANSWER}/'
done
"""


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ('"rollouts": []', [None, None]),
        ('"rollouts": [1, 2, 3]', [None, None]),
        ('"tasks": []', [None, None]),
        ('"rollouts": [7, {"reward": "1"}]', [None, None]),
        ('"rollouts": [{"reward": 0.5, "info": {"problem": 1}}, {"problem": "it raised"}]', [0.5, None]),
    ],
)
def test_a_process_that_writes_what_are_no_rewards_costs_its_episode(tmp_path, answer, rewards):
    python = tmp_path / "python"
    python.write_text(ANSWERING.replace("ANSWER", answer))
    python.chmod(0o700)
    settings = EnvironmentSettings("sums", {}, {}, str(python), [])
    player = EnvironmentPlayer(settings, MINUTES, 1, "policy", lambda: False)
    try:
        scores = player.play("http://127.0.0.1:9", ["one", "other"], {"place": 0})
        assert [score.reward for score in scores] == rewards
        assert all(bool(score.problem) == (score.reward is None) for score in scores)
    finally:
        player.close()


@pytest.mark.parametrize(
    ("failed", "why", "attempts"),
    [((0, 1, 2), "turns", 1), ((2,), "turns", 1), ((0,), "agent", 3)],
    ids=["the episode", "that rollout", "another rollout"],
)
def test_a_group_of_which_a_rollout_ends_at_a_limit_is_counted_as_that_and_not_played_again(
    tmp_path, failed, why, attempts
):
    """The last rollout meets the limit. If it is another one that fails, the episode may succeed the next time."""
    bed, player = bed_of(tmp_path, max_turns=1), Together()
    play = player.play

    def longer(url, sessions, task):
        play(url, sessions, task)
        with contextlib.suppress(urllib.error.HTTPError):
            play(url, sessions[-1:], task)
        return [Score(None, problem="it raised") if at in failed else Score(1.0) for at in range(3)]

    player.play = longer
    played_together(tmp_path, bed, player, retries=2)
    assert bed.sessions.over == {"0.0": why, "0.1": why}
    assert set(bed.sessions.ended.values()) == {"abandoned"}
    assert len(bed.sessions.ended) == 6 * attempts


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Together:
    """Plays groups as a whole, by X-Session-ID; `problems` are what goes wrong in its first episodes."""

    def __init__(self, problems=()):
        self.problems, self.episodes, self.lock = list(problems), [], threading.Lock()

    def play(self, url, sessions, task):
        with self.lock:
            self.episodes.append((task["id"], len(sessions)))
            problem = self.problems.pop(0) if self.problems else ""
        for session in sessions[:1] if problem else sessions:
            body = json.dumps({"messages": [{"role": "user", "content": task["id"]}]}).encode()
            headers = {"X-Session-ID": session, "Authorization": "Bearer EMPTY"}
            urllib.request.urlopen(
                urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
            ).close()
        scores = [Score(float(at), {"rank": at}) for at in range(len(sessions))]
        return [Score(None, problem=problem), *scores[1:]] if problem else scores

    def close(self):
        pass


def played_together(tmp_path, bed, player, retries=1, tasks=2):
    read = ReadTasks("0", tuple(Task(f"task-{at}", "", None, {}) for at in range(tasks)))
    made = Tasks((NamedSet("test", read, 1.0),))
    with bed.serving() as (_, http):
        limits = ScheduleLimits(1, retries, 99, whole_groups=True)
        curriculum = Curriculum(CurriculumSection(), Records(str(tmp_path / "difficulty.jsonl")), "")
        schedule = AgentSchedule(bed.gateway, made, None, limits, lambda _: True, curriculum)
        http.call(schedule.abandon_open())
        agents = AgentThreads(schedule, player, None, http, lambda: False)
        with agents.playing(2):
            end = time.monotonic() + MINUTES
            while not agents.is_over() and agents.failure is None:
                assert time.monotonic() < end
                time.sleep(0.02)
    assert agents.failure is None


def test_an_environment_that_raises_while_its_rewards_are_read_costs_its_episode_and_no_other(monkeypatch):
    """Without an answer the process would be killed once the time is over, with all that it plays meanwhile."""

    def complete(_played):
        raise KeyError("stages")

    async def run_slot(_slot, _context, on_trace):
        return SimpleNamespace(traces=[], errors=[])

    made = SimpleNamespace(EvalClientConfig=lambda **_: None, ModelContext=lambda **_: None)
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, made)
    env = SimpleNamespace(slots=lambda task: [task], run_slot=run_slot, complete=complete)
    asked = {"sessions": [], "base_url": "http://127.0.0.1:9/v1", "model": "policy", "timeout": MINUTES}
    assert asyncio.run(verifiers_worker.episode(env, "task", asked)) == {"problem": "KeyError: 'stages'"}


def bed_of(tmp_path, size=3, **limits):
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(None), group_size=size, **limits)
    bed.engine.say = lambda prompt: [*bed.ids("abc"), 0]
    return bed


def test_an_episode_that_fails_abandons_all_rollouts_of_its_group(tmp_path):
    bed, player = bed_of(tmp_path), Together(["it raised", "", "it raised again", "still", "and again"])
    played_together(tmp_path, bed, player, retries=1)
    assert all(count == 3 for _, count in player.episodes)
    groups = bed.sessions.groups
    assert len(groups) + len(bed.sessions.over) == 2
    for group in groups.values():
        found = [group.rollouts[at] for at in range(3)]
        assert [one.reward for one in found] == [0.0, 1.0, 2.0]
        assert len({one.attempt for one in found}) == 1
    assert set(bed.sessions.over.values()) <= {"agent"}


def test_a_group_of_which_a_part_has_its_reward_is_dropped_and_counted(tmp_path):
    bed = bed_of(tmp_path)

    async def half(bed):
        for rollout in range(3):
            session = await bed.session("0.0", rollout)
            await bed.ask(session, [{"role": "user", "content": "x"}])
            if rollout == 0:
                await bed.gateway.reward(session, {"reward": 1.0})

    bed.run(half)
    bed, player = bed_of(tmp_path), Together()
    played_together(tmp_path, bed, player)
    assert bed.sessions.over == {"0.0": "agent"}
    assert player.episodes == [("task-1", 3)]


def test_a_session_is_named_by_its_header_unless_the_key_is_one(tmp_path):
    bed = bed_of(tmp_path, 2)
    with bed.serving() as (driver, http):
        one, other = (http.call(bed.session("g", rollout)) for rollout in (0, 1))

        def status(key, header):
            headers = {"Authorization": f"Bearer {key}", "X-Session-ID": header}
            body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
            try:
                request = urllib.request.Request(f"{driver.url}/v1/chat/completions", body, headers)
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return reply.status
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        assert status("EMPTY", one) == 200
        assert status(other, one) == 200
        assert status("EMPTY", "0" * 32) == 401
        assert [len(bed.sessions.by_id[name].turns) for name in (one, other)] == [1, 1]
