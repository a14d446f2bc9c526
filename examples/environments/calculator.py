"""An environment of verifiers with a tool: `explorer.agent.environment = "verifiers:calculator"`.

    What is 37 * 58?  ->  calculate(37*58)  ->  2146  ->  2146

The tool's server is started once and serves all rollouts.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from chat_loop import ChatLoop

__all__ = ["CalculatorTasks", "ChatLoop"]

_EXPRESSION = re.compile(r"(\d{1,4})([+*])(\d{1,4})", re.ASCII)


def value(expression: str) -> str:
    """Return the value of a sum or a product of two numbers; `error` if it is neither."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error"
    left, right = int(match[1]), int(match[3])
    return str(left + right if match[2] == "+" else left * right)


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """The tool."""

    TOOL_PREFIX = None

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """Returns the value of a sum or a product."""
        return value(expression)


class CalculatorData(vf.TaskData):
    """A sum or a product.

    Args:
        answer: Its value.
    """

    answer: str


class CalculatorTask(vf.Task[CalculatorData]):
    """Scores an answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last answer is the number, else 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def called(self, trace: vf.Trace) -> float:
        """Return whether the tool was called."""
        return float(bool(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    """Which tasks there are."""

    count: int = 2000
    """How many."""
    seed: int = 0
    """What they follow from."""


class CalculatorTasks(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """Sums and products of numbers of two digits."""

    def load(self) -> Iterator[CalculatorTask]:
        """Yield them."""
        chooser = random.Random(self.config.seed)
        for _ in range(self.config.count):
            left, sign, right = chooser.randrange(10, 100), chooser.choice("+*"), chooser.randrange(10, 100)
            data = CalculatorData(
                prompt=f"What is {left} {sign} {right}?", answer=value(f"{left}{sign}{right}")
            )
            yield CalculatorTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        """Return the tool, which all rollouts share."""
        del config  # it says nothing about it
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
