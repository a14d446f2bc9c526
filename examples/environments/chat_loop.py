"""A chat loop for environments of verifiers, in their own process: no program is started for a rollout."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class ChatLoopConfig(vf.HarnessConfig):
    """No settings of its own."""


class ChatLoop(vf.Harness[ChatLoopConfig]):
    """Asks the model until it calls no tool any more."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play a rollout."""
        del trace, runtime  # verifiers keeps the trace itself
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        # The endpoint is on this host, and reading certificates takes longer than a turn of a small model.
        http = httpx.AsyncClient(verify=False, timeout=600.0)
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http)
        async with AsyncExitStack() as opened, client:
            config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, known, servers = await connect_mcp(config, opened)
            asked: dict[str, Any] = {"model": ctx.model, **({"tools": tools} if tools else {})}
            while True:
                done = await client.chat.completions.create(messages=messages, **asked)
                answer = done.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                if not answer.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in answer.tool_calls:
                    said = await _called(call.function, known, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


async def _called(function: Any, known: dict[str, tuple[str, str]], servers: Any) -> Any:
    """Return what a tool answers; the model may have written anything."""
    try:
        arguments = json.loads(function.arguments)
    except ValueError:
        return "error: no JSON"
    if function.name not in known or not isinstance(arguments, dict):
        return "error: no such call"
    return await call_mcp(servers, known, function.name, arguments)
