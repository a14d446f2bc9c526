"""What all clients play: a question, a tool that answers it, and where the answers go."""

import json
import sys

QUESTION = "hello"
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def add(arguments):
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


def report(answers):
    json.dump(answers, sys.stdout)
