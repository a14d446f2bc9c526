"""The calculator's agent with a tool that takes its time: other versions come while it waits, as with real tools."""

import random
import time
from typing import Any

import calculator_agent

SLOWEST = 40.0
"""Seconds that a call of the tool may take."""

_calculated = calculator_agent.calculated


def _slowly(arguments: str) -> str:
    time.sleep(random.uniform(1, SLOWEST))
    return _calculated(arguments)


def run(base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, float]:
    """Play a task as the calculator's agent does, slowly."""
    calculator_agent.calculated = _slowly
    return calculator_agent.run(base_url, api_key, task)
