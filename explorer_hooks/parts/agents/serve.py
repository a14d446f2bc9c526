"""`explorer serve`: the gateway's endpoint, and beside it what follows the job and writes whole groups."""

import math
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import structlog

from explorer_hooks.parts.agents.answers import AnswerParser
from explorer_hooks.parts.agents.app import GatewayApp
from explorer_hooks.parts.agents.gateway import Gateway, GatewayLimits
from explorer_hooks.parts.agents.http_thread import TOKEN, HttpThread, listening, own_token
from explorer_hooks.parts.agents.journal import TurnJournal
from explorer_hooks.parts.agents.run_record import GatewayRun, PlayedTasks
from explorer_hooks.parts.agents.service import GatewayParts, GatewayService, GroupDemand
from explorer_hooks.parts.agents.splice import Splicer, end_tokens
from explorer_hooks.parts.agents.tables import AgentSection, GatewaySection
from explorer_hooks.parts.agents.tool_formats import ToolFormat, written_format
from explorer_hooks.parts.agents.turns import TurnMaker
from explorer_hooks.run.engine_gate import EngineVersions
from explorer_hooks.run.open_explorer import FollowedEngine, followed_engine
from explorer_hooks.run.tokens import Tokens, TransformersTokens, hide_progress_bars, open_tokens
from explorer_hooks.stopping import Stop
from syncd.errors import ConfigError
from syncd.experience.writer import ExperienceWriter
from syncd.extras import install_command
from syncd.jobfile.model import JobFile

LISTEN = "127.0.0.1:8100"  # where `explorer serve` answers unless the file says otherwise

_LOG = structlog.get_logger()


def serve(file: JobFile, health: str | None = None) -> str:
    """Serve agents as a file says, and return why that ended; `health`: HOST:PORT of health checks, None for none."""
    with Stop().on_signals() as stop, opened_gateway(file, stop, health, LISTEN) as parts:
        return GatewayService(parts).run()


@contextmanager
def opened_gateway(
    file: JobFile, stop: Stop, health: str | None, listen: str, tasks: PlayedTasks | None = None
) -> Iterator[GatewayParts]:
    """Open the gateway of a file, which answers while the block lasts.

    Args:
        stop: Once it returns true, waits are given up.
        health: `HOST:PORT` to answer health checks at; None for nowhere.
        listen: `HOST:PORT` for agents and drivers, unless the file gives one.
        tasks: What this process has agents play; None if drivers do.
    """
    hide_progress_bars()
    tokens = open_tokens(file.model.path, trust_remote_code=file.model.trust_remote_code)
    if not isinstance(tokens, TransformersTokens):
        raise ConfigError("the gateway needs transformers", hint=install_command("gateway"))
    splicer, parser = _open_parts(file, tokens)
    with ExitStack() as opened:
        listener = opened.enter_context(
            closing(listening(file.explorer.part(GatewaySection).listen or listen))
        )
        followed = opened.enter_context(followed_engine(_with_spans(file), stop, health))
        job, name = followed.follower.client.job, followed.follower.client.identity or ""
        writer = opened.enter_context(ExperienceWriter(job, name))
        directory = file.explorer.part(GatewaySection).directory or _default_directory(file, name)
        journal = opened.enter_context(TurnJournal(directory))
        run = GatewayRun(writer, journal, tasks or PlayedTasks())
        sessions = run.resumed()
        versions = EngineVersions(followed.source, lambda: writer.written, followed.file)
        demand = GroupDemand()
        maker = opened.enter_context(
            closing(open_maker(followed, tokens, versions, stop, file.algorithm.temperature))
        )
        limits, model = limits_of(file), model_name(file)
        gateway = Gateway(sessions, journal, tokens, splicer, parser, maker, limits, demand.allows, model)
        journal.start(sessions.needs, sessions.rest)
        run.confirm(sessions)
        app = GatewayApp(gateway, own_token(directory), partial(followed.follower.health, watched=False))
        http = opened.enter_context(HttpThread.serving(app.application(), listener))
        token_file = os.path.join(directory, TOKEN)
        _LOG.info("gateway_serving", url=http.url, token_file=token_file, **sessions.counts)
        followed.follower.client.describe({"gateway": {"url": http.url}})
        yield GatewayParts(followed, tokens, versions, demand, writer, run, gateway, http, stop)


def open_maker(
    followed: FollowedEngine, tokens: Tokens, versions: EngineVersions, stop: Stop, temperature: float
) -> TurnMaker:
    """Return what has the engine generate turns; pending ones are given up once `stop` returns true."""
    section, is_local = followed.file.explorer, followed.file.explorer.engine.kind == "transformers"
    generator = followed.generator(tokens, versions.permitted, uuid.uuid4().hex, stop)
    generator.check()
    return TurnMaker(
        generator,
        threads=1 if is_local else section.engine.concurrency,
        rows=section.engine.rows if is_local else 1,
        hold=section.part(GatewaySection).hold,
        temperature=temperature,
    )


def _open_parts(file: JobFile, tokens: Tokens) -> tuple[Splicer, AnswerParser]:
    path, template = file.model.path, str(tokens.tokenizer.chat_template or "")
    if not template:
        hint = "put chat_template.jinja into the model directory"
        raise ConfigError("the tokenizer has no chat template", path=path, hint=hint)
    ends = end_tokens(path, tokens.tokenizer)
    if not ends:
        hint = "generation_config.json names eos_token_id"
        raise ConfigError("the model has no token that ends an answer", path=path, hint=hint)
    longest = max(map(len, tokens.tokenizer.get_vocab()))
    most = longest * file.explorer.sampling.max_prompt_tokens
    return Splicer(tokens, ends, most), AnswerParser(_tool_format(file, tokens, ends.values()), template)


def _tool_format(file: JobFile, tokens: Tokens, ends: Iterable[str]) -> ToolFormat:
    setting = file.explorer.part(GatewaySection).tool_format
    chosen = written_format(tokens, ends) if setting == "auto" else setting
    if chosen is None:
        raise ConfigError(
            "no format of explorer.gateway.tool_format reads the calls of tools that the chat template writes",
            path=file.model.path,
            hint='tool_format = "none" if no agent calls tools, or the name of the format that the model writes',
        )
    return chosen


def limits_of(file: JobFile) -> GatewayLimits:
    section, agent = file.explorer, file.explorer.part(AgentSection)
    gateway = section.part(GatewaySection)
    # Agents that the explorer starts are bounded by their own timeout, and so are their groups.
    idle = math.inf if agent.is_given else gateway.idle
    return GatewayLimits(
        file.data.group_size,
        section.sampling.max_tokens,
        section.sampling.max_prompt_tokens,
        gateway.max_turns,
        idle,
        gateway.history,
        gateway.segments,
        agents_reward=agent.rewards_by_http,
        reward_range=agent.allowed_rewards,
        tolerates=gateway.harmless_fields == "tolerate",
    )


def model_name(file: JobFile) -> str:
    return file.explorer.engine.model or os.path.basename(file.model.path.rstrip("/"))


def _with_spans(file: JobFile) -> JobFile:
    """Return the file with the demand that servers name the version of each token: a session spans several."""
    section = file.explorer.engine
    if section.kind not in ("vllm", "sglang") or file.model.publishes_adapters:
        return file
    engine = section.model_copy(update={"spans": "required"})
    return file.with_values(explorer={"engine": engine})


def _default_directory(file: JobFile, name: str) -> str:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    digest = uuid.uuid5(uuid.NAMESPACE_URL, os.path.realpath(file.job.dir)).hex[:12]
    return f"{base}/syncd/gateway/{os.path.basename(file.job.dir.rstrip('/'))}-{digest}/{name}"
