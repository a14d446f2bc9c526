"""One explorer from its configuration to its end: everything is opened here, and closed in reverse."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from zlib import crc32

import structlog

from explorer_hooks.explorer import places
from explorer_hooks.explorer.batches import Batches, Shape
from explorer_hooks.explorer.config import ExplorerFile
from explorer_hooks.explorer.cursor import Ledger
from explorer_hooks.explorer.evaluation import Evaluation
from explorer_hooks.explorer.explorer import Explorer, Rules
from explorer_hooks.explorer.generation import Applied, Generator
from explorer_hooks.explorer.pacing import ahead_of
from explorer_hooks.explorer.records import Records
from explorer_hooks.explorer.scoring import Scorer, scorer
from explorer_hooks.explorer.served import Calls, Served, served_model
from explorer_hooks.explorer.stopping import Stop
from explorer_hooks.explorer.tasks import Tasks, read_tasks
from explorer_hooks.explorer.tokens import Tokens, quiet, tokens_of
from explorer_hooks.explorer.weight_sources import Files, Source
from explorer_hooks.finding import open_hook, shown
from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.http_client import HttpClient
from syncd.client.sync_policy import SyncMethod, SyncStyle
from syncd.errors import ConfigError
from syncd.experience.writer import ExperienceWriter
from syncd.observe import log

if TYPE_CHECKING:
    from explorer_hooks.explorer.weight_sinks import Taker
    from explorer_hooks.hook import Hook

_ASK = 10.0
_MAX_ANSWER = 512 << 20
"""Bytes of the longest answer that is read: all rollouts of a group, with about a hundred bytes a token."""

_SETTLE = 2.0
"""Seconds that a group waits for an engine on no applied version where nobody loads one meanwhile."""

_BROADCASTING = (SyncMethod.NCCL, SyncMethod.AUTO)
"""Methods with which a trainer may broadcast."""

_LOG = structlog.get_logger()


def run(file: ExplorerFile) -> str:
    """Explore as a file says; return why it ended.

    Raises:
        SyncdError: Something is not usable, or went wrong for good; its exit code says what.
    """
    section = file.explorer
    log.configure(section.log, sys.stderr)
    quiet()
    tasks = read_tasks(section.tasks, section.prompt_key, section.answer_key)
    held_out = _held_out(file)
    tokens = tokens_of(file.model.path, trust_remote_code=file.model.trust_remote_code)
    with Stop().heard() as stop, ExitStack() as opened:
        reward = section.reward
        scores = scorer(
            reward.function,
            timeout=reward.timeout,
            workers=reward.workers,
            places=_import_places(file),
        )
        opened.enter_context(closing(scores))
        engine = _Engine(file, tokens, stop)
        follower = opened.enter_context(_follower(file, engine, stop))
        return _explore(file, opened, (tasks, held_out), (tokens, scores, engine, follower), stop)


def _explore(
    file: ExplorerFile,
    opened: ExitStack,
    tasks: tuple[Tasks, Tasks | None],
    parts: "tuple[Tokens, Scorer, _Engine, Follower]",
    stop: Stop,
) -> str:
    section, (training, held_out), (tokens, scores, engine, follower) = file.explorer, tasks, parts
    job, name = follower.sync.job, follower.sync.identity or ""
    opened.enter_context(structlog.contextvars.bound_contextvars(explorer=name))
    seed = f"{file.job.seed}/{name}" if section.shuffle else ""
    writer = opened.enter_context(ExperienceWriter(job, name))
    ledger = Ledger.opened(writer, training.digest, seed)
    source = opened.enter_context(engine.source(follower))
    explorer = Explorer(source, ledger, _rules(file), Records(places.metrics(job, name), job.disk), stop)
    generator = engine.generator(follower, explorer.permitted, f"{file.job.seed}/{name}/{ledger.cursor}")
    batches = Batches(
        training,
        seed or None,
        ledger,
        tokens,
        generator,
        scores,
        _shape(file),
        stop=stop,
        meanwhile=explorer.meanwhile,
        usable=explorer.usable,
    )
    evaluation = None
    if held_out is not None:
        evaluation = Evaluation(
            held_out,
            section.evaluation.every,
            Records(places.evaluations(job, name), job.disk),
            tokens,
            generator,
            scores,
            max_tokens=section.sampling.max_tokens,
            stop=stop,
        )
    explorer.equip(batches, evaluation)
    return explorer.run()


class _Engine:
    """What generates, and the hook that loads versions into it.

    Args:
        file: The configuration.
        tokens: The tokenizer.
        stop: Once true, what is in hand is given up.

    Raises:
        ConfigError: The model cannot be loaded, or the options do not fit the engine.
    """

    def __init__(self, file: ExplorerFile, tokens: Tokens, stop: Stop) -> None:
        self._section, self._tokens, self._stop = file.explorer.engine, tokens, stop
        self._token = _token(self._section.token_env)
        self._sync = file.sync
        self.name: str = self._section.kind
        self.hook: Hook
        if self._section.kind == "transformers":
            self._model = self._local_model(file)
        else:
            address = f"{self._section.kind}={self._section.address}"
            self.name = shown(address)
            self.hook = open_hook(
                address,
                settings=self._section.options,
                timeout=self._section.timeout,
                token=self._token,
            )

    def generator(self, follower: Follower, applied: Applied, seed: str) -> Generator:
        """Return what makes groups with the engine; `applied` says which version work may be done with."""
        if self._section.kind == "transformers":
            return self._local(seed)
        section = self._section
        server = HttpClient(
            section.address,
            token=self._token,
            timeout=section.timeout,
            ask_timeout=_ASK,
            missing="explorer.engine.address is that of the server itself, without /v1",
            max_answer=_MAX_ANSWER,
        )
        calls = Calls(
            server,
            section.model or served_model(server),
            follower.running,
            section.retries,
            section.timeout if self._sync.style is SyncStyle.FULLY_ASYNC else _SETTLE,
        )
        return Served(calls, concurrency=section.concurrency, applied=applied, stop=self._stop)

    @contextmanager
    def source(self, follower: Follower) -> Iterator[Source]:
        """Give what weights come from: broadcasts too where the job has them and the engine can take them."""
        if self._sync.method not in _BROADCASTING or not self._takes_broadcasts():
            yield Files(follower)
            return
        from explorer_hooks.explorer.broadcasts import Broadcasts  # noqa: PLC0415 - torch

        taker = self._taker(follower)
        with closing(taker.receiver):
            yield Broadcasts(
                follower,
                taker,
                patience=self._sync.save_timeout,
                ready=self._sync.ready_timeout,
                stop=self._stop,
            )

    def _takes_broadcasts(self) -> bool:
        if not isinstance(self.hook, HttpEngineHook):
            return True
        reason = "torch is not installed" if find_spec("torch") is None else self.hook.no_broadcasts()
        if reason:
            _LOG.info("broadcasts_disabled", reason=reason)
        return not reason

    def _taker(self, follower: Follower) -> "Taker":
        from explorer_hooks.explorer.http_receiver import ServedReceiver  # noqa: PLC0415 - torch
        from explorer_hooks.explorer.weight_sinks import IntoModel, IntoServer  # noqa: PLC0415 - torch
        from syncd.transports.broadcast.receive import Receiver  # noqa: PLC0415 - torch

        if isinstance(self.hook, HttpEngineHook):
            return IntoServer(ServedReceiver(follower.sync, self.hook), self.hook, follower)
        receiver = Receiver(follower.sync, self._model.state_dict())
        return IntoModel(receiver, self.hook)  # type: ignore[arg-type] # it is a TransformersHook

    def _local_model(self, file: ExplorerFile) -> Any:
        from explorer_hooks.explorer.local import load_model  # noqa: PLC0415 - torch
        from explorer_hooks.hooks.transformers import TransformersHook  # noqa: PLC0415 - torch

        trusted = file.model.trust_remote_code
        model = load_model(file.model.path, self._section, trust_remote_code=trusted)
        self.hook = TransformersHook(model, timeout=self._section.timeout)
        return model

    def _local(self, seed: str) -> Generator:
        from explorer_hooks.explorer.local import Local  # noqa: PLC0415 - torch
        from explorer_hooks.explorer.sampler import ends_of  # noqa: PLC0415 - torch

        return Local(
            self._model,
            ends_of(self._model, getattr(self._tokens, "tokenizer", None)),
            self._tokens,
            rows=self._section.rows,
            seed=crc32(seed.encode()),
            generating=self.hook.generating,  # type: ignore[attr-defined] # it is a TransformersHook
            stop=self._stop,
        )


def _follower(file: ExplorerFile, engine: _Engine, stop: Stop) -> Follower:
    follow = file.explorer.follow
    options = FollowOptions(
        max_lag=follow.max_lag,
        stage=follow.stage or None,
        verify=follow.verify,
        retries=follow.retries,
        state_dir=file.job.state_dir or None,
    )
    return Follower.open(
        file.job.dir,
        engine.hook,
        file.explorer.name or None,
        options,
        engine=engine.name,
        listener=_tell,
        stop=stop,
    )


def _tell(level: str, event: str, fields: Mapping[str, Any]) -> None:
    getattr(_LOG, level)(event, **fields)


def _rules(file: ExplorerFile) -> Rules:
    sync = file.sync
    return Rules(
        sync.style,
        sync.interval,
        sync.offset,
        ahead_of(file),
        file.data.groups / file.groups,
        file.explorer.patience,
        sync.timeout,
        file.explorer.max_batches,
    )


def _shape(file: ExplorerFile) -> Shape:
    sampling = file.explorer.sampling
    return Shape(
        file.groups,
        file.data.group_size,
        sampling.max_tokens,
        sampling.max_prompt_tokens,
        file.temperature,
        file.explorer.epochs,
        file.explorer.reward.max_failures,
    )


def _held_out(file: ExplorerFile) -> Tasks | None:
    evaluation, section = file.explorer.evaluation, file.explorer
    if not evaluation.tasks or not evaluation.every:
        return None
    return read_tasks(evaluation.tasks, section.prompt_key, section.answer_key, evaluation.limit)


def _import_places(file: ExplorerFile) -> list[str]:
    """Return where reward functions are looked for: beside the file, and in the present directory."""
    return [os.path.dirname(file.job.source) or os.getcwd(), os.getcwd()]


def _token(variable: str) -> str | None:
    if not variable:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"explorer.engine.token_env names {variable}, which is not set", hint=f"export {variable}=..."
        )
    return os.environ[variable]
