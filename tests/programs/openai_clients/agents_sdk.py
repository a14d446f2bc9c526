"""openai-agents with its default model, the Responses API, and with chat completions; whole and as streams."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api
from told import QUESTION, report


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def main():
    answers = {}
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        agent = Agent(name="adder", instructions="Add.", tools=[add])
        answers[api] = (await Runner.run(agent, QUESTION)).final_output
        streamed = Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "run_item_stream_event" in kinds
        answers[f"{api} streamed"] = streamed.final_output
    report(answers)


asyncio.run(main())
