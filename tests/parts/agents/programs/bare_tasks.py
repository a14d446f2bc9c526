"""An environment of verifiers with a task and nothing else: verifiers has the chat loop."""

import verifiers.v1 as vf

__all__ = ["BareTasks"]


class BareTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class BareTasks(vf.Taskset[BareTask]):
    def load(self):
        yield BareTask(vf.TaskData(prompt="say something", system_prompt="be brief"), self.config.task)
