"""callback: the user's own Python functions load the version."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from explorer_hooks.finding import FORM, imported
from explorer_hooks.hook import ChangesHook, HookOptions, ProbeAnswer, ProbeTime, ProbingHook, Running
from explorer_hooks.hooks.phases import RESTART, PhaseHook
from explorer_hooks.proof.server_probes import Rows, dtype_word
from explorer_hooks.strict_json import log_prob
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, SyncdError, TimedOutError
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory, WeightTensors
from syncd.transports.tensors import TensorMeta

if TYPE_CHECKING:
    from explorer_hooks.hooks.parameters import ModelParameters

RunningOrLabel = Running | str | None
ProbeFunction = Callable[[Rows], ProbeAnswer | Sequence[Sequence[float]]]

_PARAMETERS = "parameters = explorer_hooks.hooks.parameters.ModelParameters(model.state_dict(keep_vars=True))"
_FILL = "def load(target): parameters.load(target)  # the parameters that the hook was given"
_CURRENT = "current() returns the label of what the engine runs, as target.label had it, or None"
_PROBE = "probe(tokens) returns, for each sequence, the log-prob of each token after the first"


class CallbackHook(PhaseHook, ProbingHook, ChangesHook):
    """Calls functions in one thread that makes no other calls.

    The follower treats a `ConnectionError` or `TimeoutError` that they raise as an engine that does not answer, and
    any other exception as a failed load. A subclass may set other `kinds`.

    Args:
        load: Loads the weights of a target.
        current: Returns what the engine runs; without it the hook reports what it committed last.
        tensors: Returns the engine's tensors, None if it cannot list them.
        abort: Restores the engine to a target, None: to what is good; without it the last good version is loaded.
        commit: Has the engine serve the loaded weights; without it `load` does.
        probe: Returns log-probs of sequences of tokens, or a `ProbeAnswer`; without it no probe is asked.
        probes: When it is called: "serving", after `commit`, or "held", before it.
        dtype: The dtype in which the engine computes, by its name in torch.
        parameters: The engine's tensors, if they are in this process: `load` then calls their `load(target)` once
            nobody uses them, and reads no files itself. So versions that are stored as changes go straight into them.
        timeout: Seconds that one call may take.
    """

    name: ClassVar[str] = "callback"
    kinds: ClassVar[frozenset[str]] = frozenset({"weights"})

    def __init__(
        self,
        load: Callable[[WeightDirectory], object],
        current: Callable[[], RunningOrLabel] | None = None,
        tensors: Callable[[], Mapping[str, TensorMeta] | None] | None = None,
        abort: Callable[[WeightDirectory | None], object] | None = None,
        *,
        commit: Callable[[WeightDirectory], object] | None = None,
        probe: ProbeFunction | None = None,
        probes: ProbeTime = "serving",
        dtype: str | None = None,
        parameters: "ModelParameters | None" = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self.reads_changes = self.checks_content = parameters is not None
        self.parameters = parameters
        self.probes = probes if probe is not None else ""
        self._probe, self._dtype = probe, dtype
        self._load, self._commit, self._abort = load, commit, abort
        self._current, self._tensors = current, tensors
        self._timeout = timeout
        self._caller = CallThread("callback-hook")

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for the object that an import path names.

        The object is a function that loads a target, or has such a function as `load` and, if it needs them,
        `current`, `tensors`, `abort`, `commit`, `probe`, `probes`, `dtype` and `parameters`; a module will do.
        """
        if not options.address:
            raise ConfigError("the callback hook needs an import path", hint=f"--hook callback={FORM}")
        thing = imported(options.address)
        load = getattr(thing, "load", thing)
        if not callable(load):
            raise ConfigError(
                f"{options.address} is not a function and has no load", hint=f"--hook callback={FORM}"
            )
        rest = {
            name: getattr(thing, name, None) for name in ("current", "tensors", "abort", "commit", "probe")
        }
        probes: Any = getattr(thing, "probes", "serving")
        if probes not in ("held", "serving"):
            raise ConfigError(
                f"probes of {options.address} is {probes!r}", hint='probes = "held" or "serving"'
            )
        dtype = dtype_word(getattr(thing, "dtype", None))
        parameters = _parameters_of(thing, options.address)
        return cls(load, **rest, probes=probes, dtype=dtype, parameters=parameters, timeout=options.timeout)

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return what the function `tensors` returns; without it those of `parameters`, None without both."""
        if self._tensors is None and self.parameters is not None:
            return self.parameters.metas
        return None if self._tensors is None else self._ask(self._tensors)

    def takes_changes(self) -> bool:
        return self.parameters is not None and self.parameters.takes_changes()

    def fill_seconds(self) -> float | None:
        return self.parameters.seconds if self.parameters is not None else None

    def current_version(self) -> Running:
        if self._current is None:
            return Running(self._label)
        version = self._ask(self._current)
        running = version if isinstance(version, Running) else Running(version)
        if not isinstance(running.label, str | None):
            raise EngineUnreachableError(f"the function current returned {running.label!r}", hint=_CURRENT)
        return running

    def probe(
        self, target: WeightDirectory | WeightTensors | None, tokens: Sequence[Sequence[int]]
    ) -> ProbeAnswer:
        del target  # the function knows what it has loaded
        function = self._probe
        if function is None:
            raise LoadFailedError("the engine answers no probes", hint=_PROBE)
        try:
            return _answer_of(
                self._call("answering the probe", lambda: function(tokens), LoadFailedError), tokens
            )
        except LoadFailedError as error:
            error.hint = error.hint or _PROBE
            raise
        except (TypeError, ValueError) as error:
            raise LoadFailedError(
                f"what the function probe returned is no answer: {error}", hint=_PROBE
            ) from error

    def dtype(self) -> str | None:
        return self._dtype

    def abort(self, last_good: WeightDirectory | None) -> None:
        if last_good is None and (self._abort is None or not self._state.touched):
            self._state.require_untouched(RESTART)
            return
        self._keep(UNKNOWN_LABEL)
        with self._state.restoring(RESTART):
            self._restore(last_good)
        self._keep(last_good.label if last_good else None)

    def close(self) -> None:
        self._caller.close()

    def _restore(self, last_good: WeightDirectory | None) -> None:
        if self._abort is not None:
            self._change("going back", self._abort, last_good)
        elif last_good is not None:
            self.load(last_good)
            self.commit(last_good)

    def _do(self, phase: str, target: WeightDirectory) -> None:
        if phase == "prepare" and self.parameters is not None:
            self._call(f"preparing {target.label}", partial(self.parameters.prepare, target), LoadFailedError)
        elif phase == "load":
            self._change(f"loading {target.label}", self._load, target)
            self._require_filled(target)
        elif phase == "commit" and self._commit is not None:
            self._change(f"committing {target.label}", self._commit, target)

    def _require_filled(self, target: WeightDirectory) -> None:
        if self.parameters is not None and self.parameters.label != target.label:
            raise LoadFailedError("the function load did not fill the parameters", hint=_FILL)

    def _change(self, what: str, function: Callable[[Any], object], target: WeightDirectory | None) -> None:
        self._call(what, lambda: function(target), LoadFailedError)

    def _ask(self, function: Callable[[], Any]) -> Any:
        return self._call("asking the engine", function, EngineUnreachableError)

    def _call(self, what: str, function: Callable[[], Any], wrong: type[SyncdError]) -> Any:
        """Return what a function returns; raise an error of the user's code as one that a follower knows."""
        try:
            return self._caller.call(function, self._timeout)
        except TimedOutError as error:
            raise wrong(f"{what}: {error.message}") from error
        except SyncdError:
            raise
        except Exception as error:
            kind = EngineUnreachableError if isinstance(error, ConnectionError | TimeoutError) else wrong
            raise kind(f"{what}: {type(error).__name__}: {error}") from error


def _parameters_of(thing: Any, address: str) -> "ModelParameters | None":
    parameters: Any = getattr(thing, "parameters", None)
    if parameters is None or callable(parameters):  # a module of torch has a method of that name
        return None
    if not hasattr(parameters, "takes_changes"):
        raise ConfigError(f"parameters of {address} are {parameters!r}", hint=_PARAMETERS)
    return parameters  # type: ignore[no-any-return]


def _answer_of(returned: Any, tokens: Rows) -> ProbeAnswer:
    answer = returned if isinstance(returned, ProbeAnswer) else ProbeAnswer(tuple(returned))
    rows = tuple(tuple(log_prob(float(value)) for value in row) for row in answer.logprobs)
    lengths = [len(row) + 1 for row in rows]
    if lengths != list(map(len, tokens)):
        raise ValueError(f"log-probs of {lengths} tokens for sequences of {list(map(len, tokens))}")
    return answer._replace(logprobs=rows)


class CallThread:
    """Makes calls in one thread, in order, and waits for each within a bound.

    A call that outlasts its time cannot be stopped; the next call waits for it, within its own bound. A call that has
    not begun when its time is over is not made.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon thread: a call that never ends must not keep the interpreter from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], Any], timeout: float) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, function))
        wait([future], timeout)
        if not future.done() and future.cancel():
            raise EngineUnreachableError(f"the call before this one has not ended within {timeout:g} s")
        if not future.done():
            raise TimedOutError(f"the call has not ended within {timeout:g} s")
        return future.result(0)

    def close(self) -> None:
        """Have the thread end after its current call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            _run_call(*item)


def _run_call(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - `call` raises it
        future.set_exception(error)
    else:
        future.set_result(result)
