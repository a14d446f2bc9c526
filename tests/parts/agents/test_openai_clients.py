"""Clients of OpenAI's API, as they are, play a rollout with a tool; what they are told is what is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gateway_bed import GatewayBed, ScriptedEngine
from support.paths import ROOT
from support.served_process import MINUTES

from explorer_hooks.parts.agents.rows import experiences_of

PYTHON = Path(os.environ.get("SYNCD_OPENAI_CLIENTS_PYTHON", f"{ROOT}/.venv-openai-clients/bin/python"))
"""The interpreter of an environment that has the clients."""

CALL = 'so <tool_call>{"name": "add", "arguments": {"a": 1,  "b": 2}}</tool_call>'

NEEDS_CLIENTS = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}: make test-openai-clients installs the clients"
)
CLIENTS = [
    pytest.param("openai_client", sys.executable, id="openai"),
    pytest.param("agents_sdk", str(PYTHON), id="openai-agents", marks=NEEDS_CLIENTS),
    pytest.param("langchain_client", str(PYTHON), id="langchain", marks=NEEDS_CLIENTS),
    pytest.param("litellm_client", str(PYTHON), id="litellm", marks=NEEDS_CLIENTS),
]


@pytest.mark.parametrize(("client", "python"), CLIENTS)
def test_a_client_plays_a_tool_and_is_recorded_token_by_token(tmp_path, client, python):
    """Each of its rollouts is a call of a tool, and an answer that continues the recorded tokens of the call."""
    bed = GatewayBed(tmp_path / "journal", ScriptedEngine(None), group_size=1, max_turns=64, max_tokens=200)
    call, end = [*bed.ids(CALL), 0], [*bed.ids("three"), 0]
    tool = bed.tokenizer.convert_tokens_to_ids("<|tool|>")
    bed.engine.say = lambda prompt: end if tool in prompt else call
    with bed.serving() as (driver, _):
        session = driver.session("g", 0)
        played = subprocess.run(
            [python, f"{ROOT}/tests/programs/openai_clients/{client}.py"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "OPENAI_BASE_URL": session["base_url"],
                "OPENAI_API_KEY": session["api_key"],
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            capture_output=True,
            text=True,
            timeout=MINUTES,
            check=False,
        )
        assert played.returncode == 0, played.stderr[-3000:]
        answers = json.loads(played.stdout.splitlines()[-1])
        assert answers
        assert set(answers.values()) == {"three"}
        driver.reward(session, 1.0)
        rows = experiences_of(bed.sessions.groups["g"], "g", 1.0)
    assert len(rows) == len(answers), "a rollout has one segment"
    for row in rows:
        drawn = [
            token for token, own in zip(row.tokens[row.prompt_length :], row.action_mask, strict=True) if own
        ]
        assert drawn == [*call, *end]
    assert not bed.gateway.refused
