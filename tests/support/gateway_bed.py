"""A gateway over a scripted engine, in this process or behind HTTP; and drivers of gateways of any kind."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request

from explorer_hooks.parts.agents.answers import AnswerParser
from explorer_hooks.parts.agents.app import GatewayApp
from explorer_hooks.parts.agents.chat import read_request
from explorer_hooks.parts.agents.driver import SessionRequest
from explorer_hooks.parts.agents.gateway import Gateway, GatewayLimits
from explorer_hooks.parts.agents.http_thread import HttpThread, listening
from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.replay import JournalReplay
from explorer_hooks.parts.agents.sessions import Sessions
from explorer_hooks.parts.agents.splice import Splicer
from explorer_hooks.parts.agents.turns import TurnMaker
from explorer_hooks.run.generation import Generator, GroupResult, Response
from explorer_hooks.run.token_versions import TokenVersions
from explorer_hooks.run.tokens import TransformersTokens
from support.chat_model import MARKS, TEMPLATE, make_tokenizer
from syncd.experience.model import Span

TOKEN = "secret"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class ScriptedEngine(Generator):
    """Answers each prompt with the tokens that `say` returns for it, one version a call."""

    def __init__(self, say, *, step=lambda: 0):
        self.say, self.step, self.prompts = say, step, []

    def generate(self, requests):
        for index, request in enumerate(requests):
            self.prompts.append(list(request.prompt))
            tokens = list(self.say(request.prompt))[: request.max_tokens]
            if not tokens:
                yield GroupResult(index, problem="away", retry=True)
                continue
            pair = (1, self.step())
            versions = TokenVersions((Span(0, *pair),))
            response = Response(tokens, [-0.5 - 0.001 * one for one in tokens], versions=versions)
            yield GroupResult(index, (response,), pair, pair)


class GatewayBed:
    """A gateway with a journal in a directory.

    Args:
        directory: Of the journal; one that is there is resumed.
        engine: What generates.
        hold: Seconds that a turn waits for the engine.
        groups: Groups that have room.
        template: Shows whether the model thinks.
        tool_format: How it writes calls of tools.
        characters: Of a prompt at most.
        **limits: Of `GatewayLimits`.
    """

    def __init__(
        self,
        directory,
        engine,
        *,
        hold=5.0,
        groups=100,
        template=TEMPLATE,
        tool_format="hermes",
        characters=1 << 20,
        **limits,
    ):
        self.engine, self.tokenizer = engine, make_tokenizer()
        tokens = TransformersTokens(self.tokenizer)
        ends = {at: MARKS[at] for at in (0, 1)}
        self.sessions, self.journal = Sessions(), TurnJournal(str(directory))
        try:
            self.replay = JournalReplay(self.sessions)
            self.replay.read(self.journal.records())
            self.replay.drop()
            self.journal.start(self.sessions.needs, self.sessions.rest)
        except BaseException:
            self.journal.close()
            raise
        self.maker = TurnMaker(engine, threads=8, rows=1, hold=hold, temperature=1.0)
        all_limits = {
            "group_size": 2,
            "max_tokens": 64,
            "max_prompt_tokens": 4096,
            "max_turns": 8,
            "idle": 60.0,
        }
        self.gateway = Gateway(
            self.sessions,
            self.journal,
            tokens,
            Splicer(tokens, ends, characters),
            AnswerParser(tool_format, template),
            self.maker,
            GatewayLimits(**{**all_limits, "history": "exact", **limits}),
            lambda open_groups: open_groups < groups,
            "policy",
        )

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def session(self, group="g", rollout=0, attempt=0):
        return (await self.gateway.open(SessionRequest(group, "task", rollout, attempt)))["session"]

    async def ask(self, session, messages, *, retry=False, **more):
        """Return the answer's message, and the history with it, as an agent keeps it."""
        request = read_request({"messages": messages, **more})
        done = await self.gateway.turn(session, request, request.key, is_retry=retry)
        said = done.document["choices"][0]["message"]
        return said, [*messages, said]

    def run(self, main):
        """Run a coroutine function, and close the journal."""

        async def whole():
            try:
                return await main(self)
            finally:
                await asyncio.sleep(0)

        try:
            return asyncio.run(whole())
        finally:
            self.close()

    @contextlib.contextmanager
    def serving(self, health=lambda: (True, {"ready": True})):
        """Serve it at a free port while the block lasts; yields a driver."""
        app = GatewayApp(self.gateway, TOKEN, health).application()
        with listening("127.0.0.1:0") as listener, HttpThread.serving(app, listener) as http:
            yield GatewayDriver(http.url, TOKEN), http
        self.close()

    def close(self):
        self.maker.close()
        self.journal.close()


class GatewayDriver:
    """Asks a gateway as drivers do."""

    def __init__(self, url, token):
        self.url, self.token = url, token

    def post(self, path, body=None, token=None):
        """Return status and document of an answer."""
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        return _answer(urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), headers))

    def get(self, path):
        """Return status and document of an answer."""
        return _answer(urllib.request.Request(self.url + path))

    def session(self, group, rollout, attempt=0):
        body = {"group": group, "task": f"task-{group}", "rollout": rollout, "attempt": attempt}
        status, told = self.post("/sessions", body)
        while status == 429:  # the trainer needs no group yet
            time.sleep(0.1)
            status, told = self.post("/sessions", body)
        assert status == 200, told
        return told

    def reward(self, session, reward, **info):
        status, told = self.post(f"/s/{session['session']}/reward", {"reward": reward, "info": info})
        assert status == 200, told
        return told


def _answer(request):
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
