"""What becomes of each field of a request, as tables: it is used, replaced, without effect, harmless, or refused.

docs/agents.md has the same tables for people; a test compares them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from explorer_hooks.parts.agents.api_errors import refused

Values = Mapping[str, tuple[object, ...]]

REPLACED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""Sampling settings: taken, and replaced by those of the job."""

_NO_EFFECT = frozenset({"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Fields that say nothing about the answer."""

_DISTRIBUTION = "it changes the distribution that is trained"
_WHY: Mapping[str, str] = {
    "n": "a session has one answer a turn; open a session for each rollout",
    "top_logprobs": "log-probs of the drawn tokens alone are recorded",
    "logit_bias": _DISTRIBUTION,
    "response_format": f"constrained decoding: {_DISTRIBUTION}",
    "text.format": f"constrained decoding: {_DISTRIBUTION}",
    "tool_choice": f"constrained decoding: {_DISTRIBUTION}",
    "previous_response_id": "send the whole history: the gateway keeps tokens, not conversations",
    "conversation": "send the whole history: the gateway keeps tokens, not conversations",
}


@dataclass(frozen=True, slots=True)
class FieldTable:
    used: Collection[str] = ()  # what the answer depends on
    only: Values = field(default_factory=dict)  # fields that are taken with these values alone
    # Fields that ask for what the gateway does not do and agents can do without, with the values that ask for
    # nothing.
    harmless: Values = field(default_factory=dict)
    # Of a field that is an object, the table of its own fields.
    parts: "Mapping[str, FieldTable]" = field(default_factory=dict)


_HARMLESS: Values = {
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
}

CHAT = FieldTable(
    frozenset(
        {
            *("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "logprobs"),
            *("stream", "stream_options", "chat_template_kwargs"),
        }
    ),
    {
        "n": (1,),
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
    },
    {**_HARMLESS, "reasoning_effort": (), "verbosity": (), "prediction": ()},
)

RESPONSES = FieldTable(
    frozenset({"input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream"}),
    {"background": (False,), "include": ([], ["reasoning.encrypted_content"]), "top_logprobs": (0,)},
    {
        **_HARMLESS,
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "reasoning": ({},),
        "stream_options": ({},),
    },
    {"text": FieldTable(only={"format": ({"type": "text"},)}, harmless={"verbosity": ()})},
)


def check_fields(body: Mapping[str, Any], table: FieldTable, *, tolerates: bool, of: str = "") -> list[str]:
    """Return the names of the harmless fields of a body that ask for something, which it `tolerates` or refuses."""
    harmless: list[str] = []
    for key, value in body.items():
        name = f"{of}{key}"[:80]
        if value is None or key in table.used or (not of and key in _NO_EFFECT | REPLACED):
            continue
        if key in table.parts and isinstance(value, dict):
            harmless += check_fields(value, table.parts[key], tolerates=tolerates, of=f"{key}.")
        elif key in table.only:
            if value not in table.only[key]:
                raise unsupported(name, value)
        elif key not in table.harmless:
            raise refused(f"{name} is not supported", name)
        elif value not in table.harmless[key]:
            if not tolerates:
                raise harmless_refused(name, value)
            harmless.append(name)
    return harmless


def unsupported(name: str, value: object) -> Exception:
    why = _WHY.get(name, "")
    return refused(f"{name} = {_shown(value)} is not supported{': ' * bool(why)}{why}", name)


def harmless_refused(name: str, value: object) -> Exception:
    hint = 'explorer.gateway.harmless_fields = "tolerate" takes it without effect'
    return refused(f"{name} = {_shown(value)} has no effect here: {hint}", name)


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:80]
