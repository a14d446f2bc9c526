"""litellm with a tool, over chat completions and Responses, whole and as a stream."""

import os

import litellm
from told import ADD, QUESTION, add, report

WHERE = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}


def chat(stream):
    history = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = litellm.completion(
            "openai/policy", history, tools=[{"type": "function", "function": ADD}], stream=stream, **WHERE
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=history)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
        history += [message.model_dump(exclude_none=True), result]
    raise AssertionError("the model goes on calling tools")


def respond(stream):
    items = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        answer = litellm.responses(
            model="openai/policy",
            input=items,
            tools=[{"type": "function", "strict": True, **ADD}],
            stream=stream,
            **WHERE,
        )
        if stream:
            answer = next(event.response for event in answer if event.type == "response.completed")
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output[-1].content[0].text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)}
            for call in calls
        ]
        items += [item.model_dump(exclude_none=True) for item in answer.output] + results
    raise AssertionError("the model goes on calling tools")


report({f"{play.__name__} {stream}": play(stream) for play in (chat, respond) for stream in (False, True)})
