"""One explorer from its configuration to its end: everything is opened here, and closed in reverse order."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import structlog

from explorer_hooks.explorer.batches import BatchMaker
from explorer_hooks.explorer.config import ExplorerFile
from explorer_hooks.explorer.engine_gate import EngineGate, EngineVersions
from explorer_hooks.explorer.evaluation import Evaluation
from explorer_hooks.explorer.explorer import Explorer
from explorer_hooks.explorer.generation import GeneratorContext, InferenceEngine, Sampling
from explorer_hooks.explorer.own_files import EVALUATIONS, METRICS, Records, TaskLedger, own_path
from explorer_hooks.explorer.own_server import serving
from explorer_hooks.explorer.pacing import ahead_of
from explorer_hooks.explorer.scoring import Scorer, open_scorer
from explorer_hooks.explorer.served import ServerEngine
from explorer_hooks.explorer.tasks import Tasks, hide_progress_bars, open_tokens, read_tasks
from explorer_hooks.explorer.teacher import TaughtGenerator, Teacher
from explorer_hooks.explorer.tinker import TinkerInference
from explorer_hooks.explorer.weight_sources import EarlySource, WeightSource
from explorer_hooks.follower.follower import Follower
from explorer_hooks.follower.health import HealthServer
from explorer_hooks.follower.policy import EventListener, FollowOptions
from explorer_hooks.follower.service import log_listener
from explorer_hooks.hook import TensorHook
from explorer_hooks.stopping import Stop
from syncd.errors import ConfigError
from syncd.experience.writer import ExperienceWriter
from syncd.transports.base import EarlyReceiver, Transport, find_transport, transport_names

_LOCAL = "explorer_hooks.explorer.local:LocalEngine"
"""What generates in this process; it is loaded only then, because it needs torch."""

_LOG = structlog.get_logger()


def run(file: ExplorerFile, health: str | None = None) -> str:
    """Explore as a file says, and return why the explorer ended.

    Args:
        file: The job's file.
        health: `HOST:PORT` to answer health checks at; None for nowhere.

    Raises:
        SyncdError: Something cannot be used, or failed for good; its exit code says what.
    """
    section = file.explorer
    listener = log_listener(section.log, "auto", sys.stderr)
    hide_progress_bars()
    tasks, held_out = read_tasks(section.tasks, section.prompt_key, section.answer_key), _held_out(file)
    tokens = open_tokens(file.model.path, trust_remote_code=file.model.trust_remote_code)
    with Stop().on_signals() as stop, ExitStack() as opened:
        server = opened.enter_context(HealthServer.serving(health)) if health is not None else None
        file = opened.enter_context(serving(file, stop))
        scorer = opened.enter_context(closing(_open_scorer(file)))
        engine = _open_engine(file)
        teacher = Teacher(section.teacher, tokens) if section.teacher.address else None
        follower = opened.enter_context(_open_follower(file, engine, listener, stop))
        if server is not None:
            server.health = partial(follower.health, watched=False)  # while it generates, nobody takes turns
            listener("info", "health_served", {"url": server.url})
        job, name = follower.sync.job, follower.sync.identity or ""
        opened.enter_context(structlog.contextvars.bound_contextvars(explorer=name))
        seed = f"{file.job.seed}/{name}"
        writer = opened.enter_context(ExperienceWriter(job, name))
        ledger = TaskLedger.open(writer, tasks.digest, seed if section.shuffle else "")
        source = opened.enter_context(_open_source(file, engine, follower, stop))
        versions = EngineVersions(source, ledger, file.data.groups / file.groups, ahead_of(file))
        draws = f"{seed}/{ledger.cursor.seed_text}"
        context = GeneratorContext(
            tokens, follower.running, follower.pair_named, versions.permitted, draws, stop
        )
        sampling = Sampling(file, tokens, engine.generator(context), scorer, stop)
        evaluation = None
        if held_out is not None:
            records = Records(own_path(job, name, EVALUATIONS), job.disk)
            evaluation = Evaluation(held_out, records, sampling)
        gate = EngineGate(versions, evaluation, file.sync, stop)
        batches = BatchMaker(tasks, ledger, _taught(sampling, teacher), gate)
        metrics = Records(own_path(job, name, METRICS), job.disk)
        return Explorer(versions, gate, batches, ledger, file, metrics, stop).run()


def _taught(sampling: Sampling, teacher: Teacher | None) -> Sampling:
    """Return what makes responses that the teacher reads; those of an evaluation it does not."""
    if teacher is None:
        return sampling
    return replace(sampling, generator=TaughtGenerator(sampling.generator, teacher, sampling.stop))


def _open_engine(file: ExplorerFile) -> InferenceEngine:
    """Return the engine.

    Raises:
        ConfigError: The model cannot be loaded, or the options do not fit the engine.
    """
    kind = file.explorer.engine.kind
    if kind != "transformers":
        return TinkerInference(file) if kind == "tinker" else ServerEngine(file)
    try:
        opener: Callable[[ExplorerFile], InferenceEngine] = resolve_name(_LOCAL)
    except ImportError as error:
        hint = "pip install 'syncd[transformers]'"
        raise ConfigError('explorer.engine.kind = "transformers" needs transformers', hint=hint) from error
    return opener(file)


@contextmanager
def _open_source(
    file: ExplorerFile, engine: InferenceEngine, follower: Follower, stop: Stop
) -> Iterator[WeightSource]:
    """Yield where weights come from: besides files a transport of tensors, if the job and the engine have one."""
    transport, hook = _tensor_transport(file.sync.method), engine.hook
    if transport is None or not isinstance(hook, TensorHook) or not _takes_tensors(hook):
        yield WeightSource(follower)
        return
    with closing(transport.open_receiver(hook.receive_context(follower.sync, stop))) as receiver:
        assert isinstance(receiver, EarlyReceiver)
        patience, ready = file.sync.save_timeout, file.sync.ready_timeout
        yield EarlySource(follower, receiver, hook, patience=patience, ready=ready, stop=stop)


def _tensor_transport(method: str) -> Transport | None:
    """Return the transport by which the trainer may deliver tensors, None if it uses files alone."""
    names = transport_names() if method == "auto" else (method,)
    found = (find_transport(str(name)) for name in names)
    return next((transport for transport in found if transport.yields == "tensors"), None)


def _takes_tensors(hook: TensorHook) -> bool:
    reason = hook.no_broadcasts()
    if reason:
        _LOG.info("broadcasts_disabled", reason=reason)
    return not reason


def _open_follower(
    file: ExplorerFile, engine: InferenceEngine, listener: EventListener, stop: Stop
) -> Follower:
    job, identity = file.job, file.explorer.name or None
    options = FollowOptions(**file.explorer.follow.model_dump(), state_dir=job.state_dir or None)
    return Follower.open(
        job.dir, engine.hook, identity, options, engine=engine.name, listener=listener, stop=stop
    )


def _open_scorer(file: ExplorerFile) -> Scorer:
    """Return a scorer whose function is looked for beside the file, and in the working directory."""
    reward, here = file.explorer.reward, os.getcwd()
    directories = [os.path.dirname(file.job.source) or here, here]
    return open_scorer(
        reward.function, timeout=reward.timeout, workers=reward.workers, directories=directories
    )


def _held_out(file: ExplorerFile) -> Tasks | None:
    evaluation, section = file.explorer.evaluation, file.explorer
    if not evaluation.tasks or not evaluation.every:
        return None
    return read_tasks(evaluation.tasks, section.prompt_key, section.answer_key, evaluation.limit)
