"""Opens what every explorer has: the engine, what keeps it at a version, and what scores responses."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

import structlog

from explorer_hooks.follower.follower import Follower
from explorer_hooks.follower.health import HealthServer
from explorer_hooks.follower.policy import EventListener, FollowOptions
from explorer_hooks.follower.service import log_listener
from explorer_hooks.hook import TensorHook
from explorer_hooks.run.generation import Generator, GeneratorContext, InferenceEngine, PermittedVersion
from explorer_hooks.run.own_server import serving
from explorer_hooks.run.scoring import Scorer, open_scorer
from explorer_hooks.run.served import ServerEngine
from explorer_hooks.run.tokens import Tokens
from explorer_hooks.run.weight_sources import WeightSource
from explorer_hooks.stopping import Stop
from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.jobfile.explorer_sections import ENGINES, SERVERS
from syncd.jobfile.model import JobFile
from syncd.registered import registered
from syncd.transports.base import Transport, find_transport, transport_names

_LOCAL = "explorer_hooks.run.local:LocalEngine"
"""What generates in this process; it is loaded only then, because it needs torch."""

_LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FollowedEngine:
    file: JobFile  # the job's file, with the address of a server that was started
    engine: InferenceEngine
    follower: Follower  # loads versions from files
    source: WeightSource  # keeps it at a version

    def generator(
        self, tokens: Tokens, permitted: PermittedVersion, seed: str, stop: Callable[[], bool]
    ) -> Generator:
        follower = self.follower
        return self.engine.generator(
            GeneratorContext(tokens, follower.running, follower.pair_named, permitted, seed, stop)
        )


@contextmanager
def followed_engine(
    file: JobFile, stop: Stop, health: str | None, *, checks_first: bool = False
) -> Iterator[FollowedEngine]:
    """Open the engine of a file, and follow the job with it.

    Args:
        stop: Once it returns true, waits are given up.
        health: `HOST:PORT` to answer health checks at; None for nowhere.
        checks_first: Whether every byte of a version is compared with its digest before the engine is touched, also
            by engines that could do so while they load: then a damaged one costs nothing but itself.
    """
    listener = log_listener(file.explorer.log, "auto", sys.stderr)
    with ExitStack() as opened:
        server = opened.enter_context(HealthServer.serving(health)) if health is not None else None
        file = opened.enter_context(serving(file, stop))
        engine = _open_engine(file)
        if checks_first:
            engine.hook.checks_content = False
        follower = opened.enter_context(_open_follower(file, engine, listener, stop))
        if server is not None:
            server.health = partial(follower.health, watched=False)  # while it generates, nobody takes turns
            listener("info", "health_served", {"url": server.url})
        name = follower.client.identity or ""
        opened.enter_context(structlog.contextvars.bound_contextvars(explorer=name))
        source = opened.enter_context(_open_source(file, engine, follower, stop))
        yield FollowedEngine(file, engine, follower, source)


def open_reward(file: JobFile, function: str = "") -> Scorer:
    """Return what scores by `function`, else as [explorer.reward] says; modules may be beside the file."""
    section, here = file.explorer.reward, os.getcwd()
    if function:
        section = section.model_copy(update={"function": function, "functions": {}})
    return open_scorer(section, [file.directory or here, here])


def _open_engine(file: JobFile) -> InferenceEngine:
    kind = file.explorer.engine.kind
    if kind in SERVERS:
        return ServerEngine(file)
    if kind != "transformers":
        engine: InferenceEngine = registered(ENGINES)[kind].load()(file)
        return engine
    try:
        opener: Callable[[JobFile], InferenceEngine] = resolve_name(_LOCAL)
    except ImportError as error:
        hint = install_command("transformers")
        raise ConfigError('explorer.engine.kind = "transformers" needs transformers', hint=hint) from error
    return opener(file)


@contextmanager
def _open_source(
    file: JobFile, engine: InferenceEngine, follower: Follower, stop: Stop
) -> Iterator[WeightSource]:
    """Yield where weights come from: besides files a transport of tensors, if the job and the engine have one."""
    transport, hook = _tensor_transport(file.sync.method), engine.hook
    if transport is None or not isinstance(hook, TensorHook) or not _takes_tensors(hook):
        yield WeightSource(follower)
        return
    with closing(transport.open_receiver(hook.receive_context(follower.client, stop))) as receiver:
        open_source: Callable[..., WeightSource] = resolve_name(transport.source)
        patience, ready = file.sync.save_timeout, file.sync.ready_timeout
        yield open_source(follower, receiver, hook, patience=patience, ready=ready, stop=stop)


def _tensor_transport(method: str) -> Transport | None:
    """Return the transport by which the trainer may deliver tensors, None if it uses files alone."""
    names = transport_names() if method == "auto" else (method,)
    transports = (find_transport(str(name)) for name in names)
    return next((transport for transport in transports if transport.source), None)


def _takes_tensors(hook: TensorHook) -> bool:
    reason = hook.no_broadcasts()
    if reason:
        _LOG.info("broadcasts_disabled", reason=reason)
    return not reason


def _open_follower(file: JobFile, engine: InferenceEngine, listener: EventListener, stop: Stop) -> Follower:
    job, identity = file.job, file.explorer.name or None
    options = FollowOptions(**file.explorer.follow.model_dump(), state_dir=job.state_dir or None)
    return Follower.open(
        job.dir, engine.hook, identity, options, engine=engine.name, listener=listener, stop=stop
    )
