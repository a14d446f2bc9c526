"""An environment of verifiers whose tasks are what goes wrong; and tasks and roles that need more than this host."""

import asyncio
import os
import time

import verifiers.v1 as vf
from chat_loop import ChatLoop

__all__ = ["ChatLoop", "Misbehaving"]

KINDS = ("good", "raises", "hangs", "nan", "no_reward", "silent", "untrained", "two", "dies", "blocks")


class MisbehavingTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> dict:
        name = self.data.name
        if name == "raises":
            raise RuntimeError("no idea")
        if name == "hangs":
            await asyncio.sleep(600)
        if name == "dies":
            os._exit(3)
        if name == "blocks":
            time.sleep(600)  # noqa: ASYNC251 - this is what goes wrong
        if name == "no_reward":
            return {}
        return {"judged": float("nan") if name == "nan" else 0.25}


class MisbehavingConfig(vf.TasksetConfig):
    image: str | None = None
    endless: bool = False


class Misbehaving(vf.Taskset[MisbehavingTask, MisbehavingConfig]):
    @property
    def INFINITE(self) -> bool:  # noqa: N802 - verifiers' name
        return self.config.endless

    def load(self):
        for name in KINDS:
            data = vf.TaskData(name=name, prompt=f"be {name}", image=self.config.image)
            yield MisbehavingTask(data, self.config.task)
