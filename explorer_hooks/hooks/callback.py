"""callback: one's own Python loads the version."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

from explorer_hooks.hook import Hook, HookOptions, Running
from explorer_hooks.hooks.load_state import Attempt, require_loadable
from explorer_hooks.hooks.worker import Worker
from explorer_hooks.importing import FORM, imported
from syncd.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnreachableError,
    LoadFailedError,
    SyncdError,
    TimedOutError,
)
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta

Say = Running | str | None
"""What an engine may say of itself: all of it, or its label only."""

_RESTART = "restart the engine"


class CallbackHook(Hook):
    """Calls functions, all of them in one thread that makes no other calls.

    What they raise becomes the follower's error: `ConnectionError` and `TimeoutError` mean that the engine does not
    answer, anything else that it could not. A subclass with other `kinds` loads those.

    Args:
        load: Takes the weights of a target in.
        current: Returns what the engine runs; without it, what was committed last through this hook.
        tensors: Returns what the engine holds, None if it cannot say.
        abort: Brings the engine back to a target, None: to what is good; without it the last good version is loaded.
        commit: Makes the loaded weights what is served; without it `load` does.
        timeout: Seconds that one call may take.
    """

    name: ClassVar[str] = "callback"

    def __init__(
        self,
        load: Callable[[WeightDirectory], object],
        current: Callable[[], Say] | None = None,
        tensors: Callable[[], Mapping[str, TensorMeta] | None] | None = None,
        abort: Callable[[WeightDirectory | None], object] | None = None,
        *,
        commit: Callable[[WeightDirectory], object] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._load, self._current, self._tensors, self._abort, self._commit = (
            load,
            current,
            tensors,
            abort,
            commit,
        )
        self._timeout = timeout
        self._label: str | None = None
        self._attempt, self._worker = Attempt(), Worker("callback-hook")

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for what an import path names.

        It is a function that loads a target, or something that has one called `load`, and `current`, `tensors`,
        `abort` and `commit` where it needs them; the module itself will do.
        """
        if not options.address:
            raise ConfigError("the callback hook needs an import path", hint=f"--hook callback={FORM}")
        thing = imported(options.address)
        load = getattr(thing, "load", thing)
        if not callable(load):
            raise ConfigError(
                f"{options.address} is not a function and has no load", hint=f"--hook callback={FORM}"
            )
        rest = {name: getattr(thing, name, None) for name in ("current", "tensors", "abort", "commit")}
        return cls(load, **rest, timeout=options.timeout)

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return what the engine holds, where there is somebody to ask."""
        return None if self._tensors is None else self._ask(self._tensors)

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse what cannot be loaded; no function is called."""
        require_loadable(target, self.kinds, self.name)
        self._attempt.prepare()

    def load(self, target: WeightDirectory) -> None:
        """Have the engine take the weights in."""
        self._attempt.load()
        self._do(f"loading {target.label}", lambda: self._load(target))

    def commit(self, target: WeightDirectory) -> None:
        """Have the engine serve them."""
        if self._commit is not None:
            commit = self._commit
            self._do(f"committing {target.label}", lambda: commit(target))
        self._label = target.label
        self._attempt.commit()

    def current_version(self) -> Running:
        """Ask the engine, or say what was committed last."""
        if self._current is None:
            return Running(self._label)
        found = self._ask(self._current)
        return found if isinstance(found, Running) else Running(found)

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Have the engine go back."""
        if last_good is None and (self._abort is None or not self._attempt.touched):
            self._attempt.require_untouched(_RESTART)
            return
        self._label = UNKNOWN_LABEL
        try:
            self._go_back(last_good)
        except LoadFailedError as error:
            raise EngineDeadError(
                f"the engine could not be brought back: {error.message}", hint=_RESTART
            ) from error
        self._label = last_good.label if last_good else None
        self._attempt.restored()

    def close(self) -> None:
        """Let the thread end."""
        self._worker.close()

    def _go_back(self, last_good: WeightDirectory | None) -> None:
        if self._abort is not None:
            abort = self._abort
            self._do("going back", lambda: abort(last_good))
        elif last_good is not None:
            self.load(last_good)
            self.commit(last_good)

    def _do(self, what: str, function: Callable[[], object]) -> None:
        try:
            self._worker.call(function, self._timeout)
        except TimedOutError as error:
            raise LoadFailedError(f"{what}: {error.message}") from error
        except Exception as error:  # noqa: BLE001 - it is somebody else's code
            _raise(what, error, LoadFailedError)

    def _ask(self, function: Callable[[], Any]) -> Any:
        try:
            return self._worker.call(function, self._timeout)
        except Exception as error:  # noqa: BLE001 - it is somebody else's code
            _raise("asking the engine", error, EngineUnreachableError)


def _raise(what: str, error: Exception, other: type[SyncdError]) -> NoReturn:
    """Raise an error of somebody else's code as one that a follower knows."""
    if isinstance(error, SyncdError) and not isinstance(error, TimedOutError):
        raise error
    kind = EngineUnreachableError if isinstance(error, ConnectionError | TimeoutError) else other
    raise kind(f"{what}: {type(error).__name__}: {error}") from error
