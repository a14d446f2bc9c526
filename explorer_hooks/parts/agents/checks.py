"""What is wrong with agents and the gateway in the job's file and no single key shows."""

import shlex
from collections.abc import Iterator

from explorer_hooks.parts.agents.tables import ENVIRONMENTS, AgentSection, GatewaySection
from explorer_hooks.run.task_checks import is_import_path
from syncd.jobfile.explorer_sections import RewardSection
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.roles import ReaderSection, given_tables

_OF_KINDS = {
    "answer": ("command",),
    "pass_env": ("command", "environment", "function"),
    "http_reward": ("command", "function"),
}
"""Keys that only some kinds of agents read."""


def agent_problems(file: JobFile, verb: str) -> Iterator[Problem]:
    """Yield what is wrong with the agents that `explorer run` starts; other commands start none."""
    if verb != "run":
        return
    agent = file.explorer.part(AgentSection)
    if agent.is_given:
        yield from gateway_problems(file, "an agent ([explorer.agent])")
        yield from _agent_evaluation(file)
    if agent.environment and file.explorer.training_sets:
        text = (
            f"{agent.environment} has tasks of its own, and explorer.tasks or [[explorer.task_sets]] others"
        )
        yield Problem("explorer.tasks", text, "leave them out; [explorer.agent.select] chooses among its own")
    yield from _agent(agent)
    if agent.is_given and agent.reward == "agent":
        yield from _unused_reward(file.explorer.reward)


def gateway_problems(file: JobFile, who: str) -> Iterator[Problem]:
    section = file.explorer
    for table in given_tables(section, ReaderSection):
        text = f"{who} asks no {table}"
        yield Problem(f"explorer.{table}", text, f"leave [explorer.{table}] out")
    if section.part(GatewaySection).segments == "last" and file.algorithm.turn_rewards:
        text = (
            'explorer.gateway.segments = "last" leaves turns out, whose rewards algorithm.turn_rewards needs'
        )
        yield Problem("explorer.gateway.segments", text, 'segments = "all"')
    if section.engine.spans == "off":
        text = f'{who} needs the version of each token, and explorer.engine.spans = "off"'
        yield Problem("explorer.engine.spans", text, "leave it out")


def _agent(agent: AgentSection) -> Iterator[Problem]:
    if not agent.is_given and agent != AgentSection():
        text = "[explorer.agent] needs explorer.agent.command or explorer.agent.function, or an environment"
        yield Problem("explorer.agent", text, 'function = "my_agent:run"')
    kinds = {"command": "a command", "function": "a function", "environment": "an environment"}
    chosen = [text for name, text in kinds.items() if getattr(agent, name)]
    if len(chosen) > 1:
        yield Problem(
            "explorer.agent", f"[explorer.agent] has {' and '.join(chosen)}", "leave all but one out"
        )
    if agent.function and not is_import_path(agent.function):
        text = f'explorer.agent.function = "{agent.function}" is not package.module:function'
        yield Problem("explorer.agent.function", text)
    if agent.reward == "function" and not agent.command:
        kind = "environment" if agent.environment else "function"
        text = f"explorer.agent.{kind} returns the reward, and explorer.agent.reward has another one read it"
        yield Problem("explorer.agent.reward", text, 'a command, or reward = "agent"')
    try:
        shlex.split(agent.command)
    except ValueError as error:
        yield Problem("explorer.agent.command", f"explorer.agent.command is no command: {error}")
    yield from _reach(agent)
    yield from _environment(agent)


def _reach(agent: AgentSection) -> Iterator[Problem]:
    """Yield what is wrong with what an agent may reach and say."""
    usual = AgentSection()
    low, high = agent.reward_range
    if not low < high:
        text = f"explorer.agent.reward_range = [{low:g}, {high:g}] has nothing in it"
        yield Problem("explorer.agent.reward_range", text, "reward_range = [0, 1]")
    for name, kinds in _OF_KINDS.items():
        if getattr(agent, name) != getattr(usual, name) and not any(getattr(agent, kind) for kind in kinds):
            text = f"explorer.agent.{name} is for {' and '.join(f'a {kind}' for kind in kinds)}"
            yield Problem(f"explorer.agent.{name}", text, "leave it out")
    for name in ("reward_range", "http_reward"):
        if agent.reward == "function" and getattr(agent, name) != getattr(usual, name):
            text = f"explorer.agent.{name} has no effect where [explorer.reward] gives the rewards"
            yield Problem(f"explorer.agent.{name}", text, "leave it out")


def _environment(agent: AgentSection) -> Iterator[Problem]:
    if not agent.environment:
        for name in ("options", "select", "episode", "python", "processes"):
            if getattr(agent, name) != getattr(AgentSection(), name):
                text = f"explorer.agent.{name} is for environments"
                yield Problem(f"explorer.agent.{name}", text, 'environment = "verifiers:NAME"')
        return
    if not agent.environment.removeprefix(ENVIRONMENTS) or not agent.environment.startswith(ENVIRONMENTS):
        text = f'explorer.agent.environment = "{agent.environment}" is not {ENVIRONMENTS}NAME'
        yield Problem("explorer.agent.environment", text)
    taskset = agent.options.get("taskset", {})
    if "id" in agent.options or not isinstance(taskset, dict) or "id" in taskset:
        text = "explorer.agent.options names an environment, or its taskset is no table"
        hint = f'environment = "{ENVIRONMENTS}TASKSET" or "{ENVIRONMENTS}ENVIRONMENT+TASKSET"'
        yield Problem("explorer.agent.options", text, hint)


def _agent_evaluation(file: JobFile) -> Iterator[Problem]:
    agent = file.explorer.part(AgentSection)
    if agent.environment and file.explorer.evaluation.named():
        text = f"{agent.environment} has tasks of its own, and evaluation sets have others"
        yield Problem("explorer.evaluation.tasks", text, "leave [explorer.evaluation] out")
    for name, section in file.explorer.evaluation.named().items():
        if agent.reward == "agent" and section.reward:
            key = f"explorer.evaluation.sets.{name}.reward" if name else "explorer.evaluation.reward"
            text = f"{key} = {section.reward!r}, and the agent itself gives the rewards"
            yield Problem(key, text, 'explorer.agent.reward = "function", or leave it out')


def _unused_reward(reward: RewardSection) -> Iterator[Problem]:
    for key in ("function", "functions", "timeout", "workers", "retries", "pause"):
        if getattr(reward, key) != getattr(RewardSection(), key):
            text = f"explorer.reward.{key} has no effect where the agent gives its reward"
            yield Problem(
                f"explorer.reward.{key}", text, 'leave it out, or explorer.agent.reward = "function"'
            )
