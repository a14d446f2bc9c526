"""LangChain's ChatOpenAI with a tool, over chat completions and Responses, whole and as a stream."""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from told import QUESTION, report


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def play(stream, strict, **options):
    model = ChatOpenAI(model="policy", **options).bind_tools([add], strict=strict, parallel_tool_calls=False)
    history = [HumanMessage(QUESTION)]
    for _ in range(2):
        if stream:
            answer = None
            for chunk in model.stream(history):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(history)
        if not answer.tool_calls:
            return answer.text
        history += [answer, *(add.invoke(call) for call in answer.tool_calls)]
    raise AssertionError("the model goes on calling tools")


report(
    {
        f"{'responses' if api else 'chat'} {stream}": play(stream, strict=True, use_responses_api=api)
        for api in (False, True)
        for stream in (False, True)
    }
)
