"""An environment of verifiers that scores whole groups: `explorer.agent.environment = "verifiers:ranked+sums"`.

An episode is `attempts` answers to the same task. Each one's reward is its rank among them, so it means something
within its group alone. `explorer.agent.episode = "group"` makes an episode a group.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["Ranked"]


class RankedConfig(vf.EnvConfig):
    """What an episode is."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """Who answers."""
    attempts: int = 8
    """Answers of an episode: `data.group_size` of the job."""


class Ranked(vf.Env[RankedConfig]):
    """Ranks answers by how far they are from the right number."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Have the task answered several times."""
        async with asyncio.TaskGroup() as answers:
            for _ in range(self.config.attempts):
                answers.create_task(agents.agent.run(task))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Replace the rewards by ranks: the share of the other answers that are further off, ties counting half."""
        misses = [_miss(trace.last_reply, task.data.answer) for trace in episode.traces]
        for trace, miss in zip(episode.traces, misses, strict=True):
            worse = sum((other > miss) + 0.5 * (other == miss) for other in misses) - 0.5
            trace.record_metric("right", trace.reward)
            trace.rewards.clear()
            trace.record_reward("rank", worse / (len(misses) - 1))


def _miss(answer: str, right: str) -> float:
    return abs(float(answer) - float(right)) if answer.isdigit() else float("inf")
