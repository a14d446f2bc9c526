"""The base of hooks for engines behind HTTP that load weights in place, between a pause and a resume.

Between two calls of the hook an engine is in one of three states: it works; it is paused with whole weights; it is
paused with unknown weights. The hook never resumes the third: it loads a good version first.
"""

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Protocol

from explorer_hooks.hook import Hook, HookOptions, ProbeAnswer, Running, TensorHook, UntouchedError
from explorer_hooks.hooks.http_settings import LOOPBACK, is_at_least, meeting_address, push_ways
from explorer_hooks.hooks.phases import require_loadable
from explorer_hooks.hooks.restarting import RestartableHook
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.http_client import HttpClient
from explorer_hooks.proof.server_probes import ServerProbe, require_known_tokens
from explorer_hooks.proof.start_model import CHECKS, StartModel, require_same_model, start_model_of
from syncd.client.client import Client
from syncd.errors import (
    DOCS,
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
)
from syncd.protocol.version import is_unpublished
from syncd.registered import registered
from syncd.transports.base import ReceiveContext, WeightDirectory, WeightTensors
from syncd.transports.tensors import Tensors

if TYPE_CHECKING:
    import torch

PUSHES = "explorer.pushes"
"""The group of entry points of `EnginePush` classes, by the name of the hook; they need torch."""

UNTOLD = "default"  # the label of an engine that was never given one


class EnginePush(Protocol):
    touched: bool
    """Whether the engine's weights may have changed."""

    def __init__(
        self, server: HttpClient, address: str, ways: Sequence[str], *, flush_cache: bool = False
    ) -> None: ...

    def run(self, label: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Load weights into the engine."""

    @classmethod
    def allocator(cls, ways: Sequence[str]) -> "Callable[[int], torch.Tensor] | None":
        """Return what allocates memory that an engine can open, None if no way needs it; remove what is left over."""


class HttpEngineHook(RestartableHook, TensorHook):
    """An engine behind HTTP that is paused, loaded, given the version's label and resumed.

    Further settings of all of them: `start_check`: `full`, `shapes` or `off`, how a version is compared with the
    engine's start model; `check_version`: whether old releases are refused; `broadcast`: true, false, or the address
    of this host at which the engine's workers join a group; `push`: how weights in this process's memory reach them.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})
    is_restored_at_once: ClassVar[bool] = True

    product: ClassVar[str]
    """The engine's name in messages."""
    oldest: ClassVar[tuple[int, ...]]
    """The oldest release that the hook supports."""
    version_path: ClassVar[str]

    def __init__(self, options: HookOptions) -> None:
        super().__init__(options)
        self._unpublished: dict[str, str] = {}
        """The label that the engine was given for unpublished weights, and what it is here, later that of the files.
        No later follower mistakes the former for a version."""
        self._start: StartModel | None = None
        self._touched = self._paused_by_us = False

    _flush_cache = True

    def _configure(self, settings: HookSettings) -> None:
        self._start_check = settings.choice("start_check", "full", CHECKS)
        self._check_version = settings.flag("check_version", default=True)
        self._address = meeting_address(settings, self._server)
        self._ways = push_ways(settings, self._server)

    @abstractmethod
    def _started_from(self) -> str | None:
        """Return the directory that the engine was started from, None if it does not say."""

    @abstractmethod
    def _pause(self) -> None:
        """Have the engine stop at a whole token."""

    @abstractmethod
    def _reload(self, directory: str, label: str) -> None:
        """Have the paused engine read a directory of this host, which has this label."""

    @abstractmethod
    def _announce(self, label: str) -> None:
        """Have the paused engine drop caches of the old weights, and set its label."""

    @abstractmethod
    def mark(self, label: str) -> None:
        """Set the label of an engine that works meanwhile."""

    @abstractmethod
    def _server_probes(self) -> Sequence[ServerProbe]:
        """Return what asks each replica of the engine for log-probs."""

    @abstractmethod
    def _resume(self) -> None:
        """Have the engine work again."""

    def _cannot_reload(self) -> str:
        """Return the flag of the engine with which it reads weights again wrongly, empty if it has none."""
        return ""

    def prepare(self, target: WeightDirectory) -> None:
        require_files(self, target)
        self._check_engine()
        self._require_reloads()
        if self._start_check != "off":
            self._check_start(target)

    def load(self, target: WeightDirectory) -> None:
        """Pause the engine and have it read the directory; it stays paused."""
        self._hold()
        self._reload_touching(target)

    def commit(self, target: WeightDirectory) -> None:
        self._announce(target.label)
        self._release()
        self._unpublished = {}

    def require_up(self) -> None:
        self._server.get(self.health_path)

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        del target  # it runs one version at a time
        start = self._start_model()
        require_known_tokens(tokens, start.vocabulary if start else None)
        first, *others = [probe.answer(tokens, with_cache=self.asks_cache) for probe in self._server_probes()]
        return first._replace(others=tuple(others))

    def start_directory(self) -> str:
        directory = self._started_from()
        here = self._paths.here(directory) if directory else ""
        return here if os.path.isdir(here) else ""

    def reload_start(self) -> bool:
        """Have the engine read again the directory that it was started from, if this host has it."""
        here = self.start_directory()
        if not here:
            return False
        self._require_reloads()
        self._hold()
        self._touched = True
        self._reload(here, UNTOLD)
        self._announce(UNTOLD)
        self._release()
        return True

    def no_broadcasts(self) -> str:
        if self.name not in registered(PUSHES):
            return "nothing that pushes weights to it is installed"
        if find_spec("torch") is None:
            return "torch is not installed"
        if "nccl" in self._ways and not resolve_name("torch.cuda:is_available")():
            return "push=nccl needs a GPU of this process, which no worker of the engine has"
        if not self._address:
            return "the engine is on another host, or broadcast=false"
        flag = self._cannot_reload()
        return f"{self.product} was started with {flag}" if flag else ""

    def receive_context(self, client: Client, stop: Callable[[], bool]) -> ReceiveContext:
        """Return a context without parameters: the receiver keeps the weights in memory that it may share."""
        return ReceiveContext(
            client, stop, None, self.check_offered, self._push_class().allocator(self._ways)
        )

    def check_offered(self, tensors: Tensors) -> None:
        if self._start_check != "off":
            self._require_same_model(tensors, "the broadcast")

    def load_received(self, weights: WeightTensors, fill: Callable[[], None]) -> None:
        """Push what was received to the engine; after a failure it may be paused with unknown weights."""
        del fill  # the parameters are the engine's
        self.load_tensors(weights.label, weights.tensors)

    def load_tensors(self, label: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Have the engine run weights that are in this process's memory, as `load_received` does."""
        self._hold()
        push = self._push_class()(
            self._server, self._address or LOOPBACK, self._ways, flush_cache=self._flush_cache
        )
        try:
            push.run(label, tensors)
        except (SyncdError, OSError) as error:
            self._touched = self._touched or push.touched
            if isinstance(error, EngineUnreachableError):
                raise
            raise self._not_taken(error) from error
        self._touched = True
        self._announce(label)
        self._unpublished = {label: label}
        self._release()

    def _push_class(self) -> type[EnginePush]:
        push: type[EnginePush] = registered(PUSHES)[self.name].load()
        return push

    def set_label(self, label: str) -> None:
        if self._unpublished:
            self._unpublished = dict.fromkeys(self._unpublished, label)
            self.mark(label)

    def drop_label(self) -> None:
        self._unpublished = {}

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Have the engine work on the last good version, or declare it dead."""
        running = self.current_version()
        if self._is_whole(running, last_good):
            self._release(is_paused=running.paused)
            return
        if last_good is None:
            raise EngineDeadError(
                "the engine is half loaded and there is no last good version",
                path=self._server.address,
                hint=self._restart_hint(),
            )
        self._restore(last_good)

    def _check_engine(self) -> None:
        self.require_up()
        if not self._check_version:
            return
        version = self._server.get_json(self.version_path).get("version")
        if not is_at_least(version, self.oldest):
            oldest = ".".join(map(str, self.oldest))
            raise ConfigError(
                f"the engine is {self.product} {version}; the hook needs {oldest}",
                path=self._server.address,
                hint=f"pip install '{self.name}>={oldest}'",
            )

    def _require_reloads(self) -> None:
        flag = "" if self.is_restarted else self._cannot_reload()
        if flag:
            problem = (
                f"{self.product} was started with {flag}, with which it reads new weights into wrong places"
            )
            hint = f"start it without {flag}, or use reload=restart: {DOCS}/follow-vllm.md#known-limits"
            raise ConfigError(problem, path=self._server.address, hint=hint)

    def _restart_hint(self) -> str:
        return f"restart the {self.product} server; it is loaded with the newest version before it takes work"

    def _check_start(self, target: WeightDirectory) -> None:
        tensors = target.tensors
        if not tensors and not target.shards:
            # A directory without a manifest is the model that a run began with.
            start = start_model_of(target.path)
            tensors = start.tensors if start else {}
        self._require_same_model(tensors, target.path)

    def _require_same_model(self, tensors: Tensors, where: str) -> None:
        if start := self._start_model():
            require_same_model(tensors, start, self._start_check, where)

    def _start_model(self) -> StartModel | None:
        if self._start is None:
            directory = self._started_from()
            self._start = start_model_of(self._paths.here(directory)) if directory else None
        return self._start

    def _running(self, label: str, *, paused: bool) -> Running:
        """Return what the label of the engine means.

        Only this process knows which weights an unpublished label stands for, until `drop_label`. In any other
        process such an engine runs unknown weights and counts as paused.
        """
        if label in self._unpublished:
            return Running(self._unpublished[label], paused)
        if is_unpublished(label):
            return Running(label, paused=True)
        return Running(None if label == UNTOLD else label, paused)

    def _not_taken(self, error: SyncdError | OSError) -> SyncdError:
        """Return the error for weights that the engine did not take; an engine with whole weights is resumed."""
        message, hint = str(error), None
        if isinstance(error, SyncdError):
            message, hint = error.message, error.hint
        if self._touched:
            return LoadFailedError(message, path=self._server.address, hint=hint)
        try:
            self._release()
        except SyncdError as other:
            return other
        return UntouchedError(message, path=self._server.address, hint=hint)

    def _hold(self) -> None:
        if not self.current_version().paused:
            self._paused_by_us = True
        self._pause()

    def _reload_touching(self, target: WeightDirectory) -> None:
        before, self._touched = self._touched, True
        try:
            self._reload(target.path, target.label)
        except UntouchedError:
            self._touched = before
            raise

    def _is_whole(self, running: Running, last_good: WeightDirectory | None) -> bool:
        if last_good is not None and running.label != last_good.label:
            return False
        if self._touched:
            # Only a restart ends the pause of a load, and removes the label too.
            return last_good is None and running == Running(None)
        return self._paused_by_us or not running.paused

    def _release(self, *, is_paused: bool = True) -> None:
        """Have an engine with whole weights work."""
        if is_paused:
            self._resume()
        self._touched = self._paused_by_us = False

    def _restore(self, last_good: WeightDirectory) -> None:
        with self._restoring(last_good.label, self._restart_hint()):
            self._pause()
            self._reload_again(last_good)
            self._announce(last_good.label)
            self._release()

    def _reload_again(self, last_good: WeightDirectory) -> None:
        """Load twice: the engine may mix the first load with what the failed one had buffered."""
        with contextlib.suppress(LoadFailedError):
            self._reload_touching(last_good)
        self._reload_touching(last_good)


def require_files(hook: Hook, target: WeightDirectory) -> None:
    """Return if a hook can load a version, its shards with their sizes: missing or truncated files crash engines."""
    require_loadable(target, hook)
    for shard in target.shards:
        path = f"{target.path}/{shard.name}"
        try:
            size = os.stat(path).st_size
        except OSError as error:
            problem = f"a file of the version cannot be read: {error.strerror}"
            raise RefusedError(problem, path=path, hint="syncd verify JOB STEP --deep") from error
        if size != shard.size:
            problem = f"it has {size} bytes instead of {shard.size}"
            raise RefusedError(problem, path=path, hint="syncd verify JOB STEP --deep")
