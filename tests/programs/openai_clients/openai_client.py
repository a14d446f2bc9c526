"""OpenAI's own client: chat completions and Responses, whole and as streams, each with a tool."""

import openai
from told import ADD, QUESTION, add, report

client = openai.OpenAI()
FUNCTION = {"type": "function", "function": ADD}
ITEM = {"type": "function", "strict": True, **ADD}


def chat(stream):
    history, model = [{"role": "user", "content": QUESTION}], client.models.list().data[0].id
    for _ in range(2):
        asked = {"model": model, "messages": history, "tools": [FUNCTION], "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            return message.content
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
        history += [message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}), result]
    raise AssertionError("the model goes on calling tools")


def respond(stream):
    items, model = (
        [{"role": "user", "content": QUESTION}],
        client.models.retrieve(client.models.list().data[0].id).id,
    )
    for _ in range(2):
        asked = {"model": model, "input": items, "tools": [ITEM], "instructions": "Add."}
        if stream:
            with client.responses.stream(**asked) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)}
            for call in calls
        ]
        items += [item.to_dict(exclude_none=True) for item in answer.output] + results
    raise AssertionError("the model goes on calling tools")


report({f"{play.__name__} {stream}": play(stream) for play in (chat, respond) for stream in (False, True)})
