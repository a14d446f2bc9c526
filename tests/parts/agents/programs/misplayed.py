"""An environment of verifiers that plays tasks of `misbehaving` with a second role, twice, or not at all."""

import verifiers.v1 as vf

__all__ = ["Misplayed"]


class MisplayedConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Misplayed(vf.Env[MisplayedConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        if task.data.name != "silent":
            await agents.agent.run(task)
        if task.data.name == "two":
            await agents.agent.run(task)
        if task.data.name == "untrained":
            await agents.judge.run(task)
