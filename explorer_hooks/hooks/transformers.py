"""transformers: a model in this process, loaded straight into its parameters while nobody generates."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch

from explorer_hooks.finding import FORM, imported
from explorer_hooks.hook import (
    ChangesHook,
    HookOptions,
    ProbeAnswer,
    ProbeTime,
    ProbingHook,
    Running,
    TensorHook,
)
from explorer_hooks.hooks.parameters import ModelParameters
from explorer_hooks.hooks.phases import LoadState, require_loadable
from explorer_hooks.hooks.settings import HookSettings
from explorer_hooks.proof.log_probs import log_probs_of
from explorer_hooks.proof.server_probes import SWITCH_OFF, dtype_word, require_known_tokens
from explorer_hooks.proof.start_model import target_of
from syncd.client.client import Client
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    RefusedError,
    SyncdError,
)
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import ReceiveContext, WeightDirectory, WeightTensors
from syncd.transports.tensors import TensorMeta

_DEAD = "start the explorer again"


class TransformersHook(TensorHook, ProbingHook, ChangesHook):
    """Loads versions into a model of this process.

    Generate inside `generating()`: a load waits for the generations in flight, and new ones wait for the load. The
    label changes in `commit`, so one generation runs one version from its beginning to its end.

    Args:
        model: Any module of torch; parameters and persistent buffers are loaded by their names in its state dict.
        timeout: Seconds that a load waits for generations, and a generation for a load.
        direct: Whether files that are not in the page cache are read past it. Set it to false if several processes
            of a host load the same files without a stage.
        cast: Whether a version may have other floating-point dtypes than the model.
        on_commit: Called with each version before it is served: for caches that depend on the weights.
        probe: Whether it answers probes: the model takes token ids, and returns logits or what has them.
    """

    name: ClassVar[str] = "transformers"
    checks_content: bool = True
    probes: ProbeTime = "held"
    is_own: ClassVar[bool] = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        timeout: float = 300.0,
        direct: bool = True,
        cast: bool = True,
        on_commit: Callable[[WeightDirectory], object] | None = None,
        probe: bool = True,
    ) -> None:
        self.model = model
        if not probe:
            self.probes = ""
        self.parameters = ModelParameters(self._loadable_tensors(), direct=direct, cast=cast)
        self._on_commit = on_commit
        self._gate, self._state = LoadGate(timeout), LoadState()
        self._label: str | None = None

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the model that an import path names, directly, as `model`, or as a function's result.

        Settings: `direct`, `cast` and `probe`, true or false.
        """
        if not options.address:
            raise ConfigError(
                "the transformers hook needs an import path", hint=f"--hook transformers={FORM}"
            )
        settings = HookSettings(cls.name, options.settings)
        direct, cast = settings.flag("direct", default=True), settings.flag("cast", default=True)
        probe = settings.flag("probe", default=True)
        settings.done()
        candidate = imported(options.address)
        if isinstance(candidate, cls):
            return candidate
        model = _model_of(candidate, options.address)
        return cls(model, timeout=options.timeout, direct=direct, cast=cast, probe=probe)

    @contextmanager
    def generating(self) -> Iterator[str | None]:
        """Keep loads out while the block generates; yields the label of the version that runs."""
        with self._gate.generating():
            yield self._label

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return the tensors of the version that runs; before the first one None if versions may be cast.

        `prepare` compares names and shapes with the model itself in any case.
        """
        return self.parameters.metas

    def prepare(self, target: WeightDirectory) -> None:
        require_loadable(target, self)
        self.parameters.prepare(target)
        self._state.prepare()

    def load(self, target: WeightDirectory) -> None:
        """Wait for generations in flight, and read the version; new generations wait until `commit`."""
        self._gate.shut()
        self._state.load()
        self.parameters.load(target)

    def commit(self, target: WeightDirectory) -> None:
        if self._on_commit is not None:
            try:
                self._on_commit(target)
            except Exception as error:
                raise LoadFailedError(f"on_commit failed: {type(error).__name__}: {error}") from error
        self._serve(target.label)

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        """Run the model on the probe, without dropout; its mode and the generators are left as they were."""
        del target  # the model has one version
        require_known_tokens(tokens, _vocabulary_of(self.model))
        try:
            with _evaluating(self.model), torch.no_grad():
                return ProbeAnswer(log_probs_of(self.model, tokens))
        except Exception as error:
            raise LoadFailedError(
                f"the model does not answer the probe: {type(error).__name__}: {error}", hint=SWITCH_OFF
            ) from error

    def dtype(self) -> str | None:
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return dtype_word(dtypes.pop()) if len(dtypes) == 1 else None

    def start_directory(self) -> str:
        name = str(getattr(getattr(self.model, "config", None), "_name_or_path", ""))
        return os.path.realpath(name) if name and os.path.isfile(f"{name}/config.json") else ""

    def reload_start(self) -> bool:
        """Read the directory of the start model again; whoever generates waits for it."""
        directory = self.start_directory()
        if not directory:
            return False
        target = target_of(directory)
        try:
            self.parameters.prepare(target)
        except RefusedError:  # its files have other names than the model's tensors
            return False
        self._gate.shut()
        self._state.load()
        self.parameters.load(target)
        self.unload()
        return True

    def unload(self) -> None:
        """Serve the weights that the model was started with, which it has again."""
        self.parameters.restart()
        self._state.restored()
        self._label = None
        self._gate.open()

    def takes_changes(self) -> bool:
        return self.parameters.takes_changes()

    def fill_seconds(self) -> float | None:
        return self.parameters.seconds

    def receive_context(self, client: Client, stop: Callable[[], bool]) -> ReceiveContext:
        return ReceiveContext(client, stop, self.parameters.tensors)

    def load_received(self, weights: WeightTensors, fill: Callable[[], None]) -> None:
        """Give what was received to the parameters, between two generations; `on_commit` is not called."""
        self._gate.shut()
        self._state.load()
        self.parameters.forget()
        try:
            fill()
        except Exception as error:
            raise LoadFailedError(
                f"the weights could not be copied in: {type(error).__name__}: {error}"
            ) from error
        self._serve(weights.label)

    def set_label(self, label: str) -> None:
        self._label = label

    def drop_label(self) -> None:
        self._label = UNKNOWN_LABEL

    def current_version(self) -> Running:
        return Running(self._label, self._gate.is_shut)

    def abort(self, last_good: WeightDirectory | None) -> None:
        try:
            self._restore(last_good)
        except (LoadFailedError, EngineDeadError) as error:
            dead = EngineDeadError(f"the model could not be restored: {error.message}", hint=_DEAD)
            self._label = UNKNOWN_LABEL
            self._gate.shut_for_good(dead)
            raise dead from error

    def _loadable_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.model.state_dict(keep_vars=True)

    def _restore(self, last_good: WeightDirectory | None) -> None:
        if last_good is None:
            self._state.require_untouched(_DEAD)
            self._gate.open()
            return
        self.load(last_good)
        self.commit(last_good)
        self._state.restored()

    def _serve(self, label: str) -> None:
        self._label = label
        self._state.commit()
        self._gate.open()


class LoadGate:
    """Keeps loads and generations apart: many threads may generate, and a load waits until none does.

    A waiting load precedes generations that come later. A thread that generates may nest another generation. Either
    side waits for the other for `timeout` seconds at most.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._generating = 0
        self.is_shut = False  # whether generations have to wait
        self._reason: SyncdError | None = None
        self._own = threading.local()

    @contextmanager
    def generating(self) -> Iterator[None]:
        depth = getattr(self._own, "depth", 0)
        if not depth:
            self._enter()
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if not depth:
                self._leave()

    def shut(self) -> None:
        """Shut the gate and wait until no thread generates; if that takes too long it opens again."""
        with self._changed:
            was, self.is_shut = self.is_shut, True
            if self._changed.wait_for(lambda: not self._generating, self._timeout):
                return
            self.is_shut = was
            self._changed.notify_all()
        raise EngineUnreachableError(f"a generation has not ended within {self._timeout:g} s")

    def open(self) -> None:
        with self._changed:
            self.is_shut, self._reason = False, None
            self._changed.notify_all()

    def shut_for_good(self, reason: SyncdError) -> None:
        """Refuse all generations with a reason until the gate is opened."""
        with self._changed:
            self.is_shut, self._reason = True, reason
            self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self.is_shut or self._reason, self._timeout):
                raise EngineUnreachableError(f"a load has not ended within {self._timeout:g} s")
            if self._reason is not None:
                raise self._reason
            self._generating += 1

    def _leave(self) -> None:
        with self._changed:
            self._generating -= 1
            self._changed.notify_all()


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _vocabulary_of(model: torch.nn.Module) -> int | None:
    """Return how many tokens the model's largest embedding has, None if there is no embedding."""
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return max((embedding.num_embeddings for embedding in embeddings), default=None)


def _model_of(candidate: Any, address: str) -> torch.nn.Module:
    for _ in range(2):
        if isinstance(candidate, torch.nn.Module):
            return candidate
        if isinstance(getattr(candidate, "model", None), torch.nn.Module):
            return candidate.model  # type: ignore[no-any-return]
        if callable(candidate):
            candidate = candidate()
    raise ConfigError(
        f"{address} is not a model, and neither has nor returns one", hint=f"--hook transformers={FORM}"
    )
