"""A single-turn environment of verifiers: `explorer.agent.environment = "verifiers:sums"`.

7+8=  ->  15
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from chat_loop import ChatLoop

__all__ = ["ChatLoop", "Sums"]

LIMIT = 10
"""Operands are below this."""


class SumData(vf.TaskData):
    """A sum.

    Args:
        answer: What the model should answer.
    """

    answer: str


class SumTask(vf.Task[SumData]):
    """Scores an answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right answer, else 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def is_number(self, trace: vf.Trace) -> float:
        """Return whether the answer is a number at all."""
        return float(trace.last_reply.isdigit())


class Sums(vf.Taskset[SumTask]):
    """All sums of two numbers from 0 to `LIMIT` - 1."""

    def load(self) -> Iterator[SumTask]:
        """Yield them."""
        for left in range(LIMIT):
            for right in range(LIMIT):
                data = SumData(name=f"{left}+{right}", prompt=f"{left}+{right}=", answer=str(left + right))
                yield SumTask(data, self.config.task)
