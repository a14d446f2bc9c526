"""transformers: a model in this process, loaded straight into its parameters while nobody generates."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

from explorer_hooks.hook import Hook, HookOptions, Running
from explorer_hooks.hooks.gate import Gate
from explorer_hooks.hooks.load_state import Attempt, require_loadable
from explorer_hooks.hooks.settings import Settings
from explorer_hooks.importing import FORM, imported
from syncd.errors import ConfigError, EngineDeadError, LoadFailedError, RefusedError
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta

if TYPE_CHECKING:
    import torch

    from syncd.transports.filesystem.read import Loaded
    from syncd.transports.filesystem.read_targets import Held
    from syncd.transports.tensors import Fit

_DEAD = "start the explorer again"


class TransformersHook(Hook):
    """Loads versions into a model of this process.

    Whoever generates does so inside `generating()`: a load waits for the generations in flight, and new ones wait for
    the load. The label changes in `commit`, so a generation has one version from its beginning to its end.

    Args:
        model: Any module of torch; parameters and persistent buffers are loaded by their names in its state dict.
        timeout: Seconds that a load waits for generations, and a generation for a load.
        direct: Whether files that are not in the page cache are read past it. Say no where several processes of a
            host load the same files without a stage.
        cast: Whether a version may have other floating-point dtypes than the model.
        on_commit: Called with each version before it is served: for caches that depend on the weights.
    """

    name: ClassVar[str] = "transformers"
    checks_content: ClassVar[bool] = True

    def __init__(
        self,
        model: "torch.nn.Module",
        *,
        timeout: float = 300.0,
        direct: bool = True,
        cast: bool = True,
        on_commit: Callable[[WeightDirectory], object] | None = None,
    ) -> None:
        from syncd.transports.filesystem.read_targets import held  # noqa: PLC0415 - torch

        self.model = model
        self.loaded: Loaded | None = None
        self._held: Held = held(model.state_dict(keep_vars=True))
        self._runs: Mapping[str, TensorMeta] | None = None if cast else self._held.metas
        self._direct, self._cast, self._on_commit = direct, cast, on_commit
        self._gate, self._attempt = Gate(timeout), Attempt()
        self._label: str | None = None

    @classmethod
    def from_options(cls, options: HookOptions) -> Self:
        """Return a hook for what an import path names: a model, what has one as `model`, or a function of these.

        Settings: `direct` and `cast`, true or false.
        """
        if not options.address:
            raise ConfigError(
                "the transformers hook needs an import path", hint=f"--hook transformers={FORM}"
            )
        settings = Settings(cls.name, options.settings)
        direct, cast = settings.flag("direct", default=True), settings.flag("cast", default=True)
        settings.done()
        found = imported(options.address)
        if isinstance(found, cls):
            return found
        model = _model_of(found, options.address)
        return cls(model, timeout=options.timeout, direct=direct, cast=cast)

    @contextmanager
    def generating(self) -> Iterator[str | None]:
        """Generate inside; gives the label of the version that runs from the beginning to the end of it.

        Raises:
            EngineUnreachableError: A load takes longer than the time-out.
            EngineDeadError: A load failed and there was no way back.
        """
        with self._gate.working():
            yield self._label

    def tensors(self) -> Mapping[str, TensorMeta] | None:
        """Return what the version that runs consists of; before the first one None if versions may be cast.

        `prepare` compares names and shapes with the model itself in any case.
        """
        return self._runs

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse what does not fit the model."""
        from syncd.transports.filesystem.load import check  # noqa: PLC0415 - torch

        require_loadable(target, self.kinds, self.name)
        check(target, self._held, cast=self._cast)
        self._attempt.prepare()

    def load(self, target: WeightDirectory) -> None:
        """Wait for generations in flight, and read the version in; new generations wait until `commit`."""
        self._gate.shut()
        self._attempt.load()
        self._fill(target)

    def commit(self, target: WeightDirectory) -> None:
        """Let generations go on, with the new version."""
        if self._on_commit is not None:
            self._reset(self._on_commit, target)
        self._label = target.label
        self._attempt.commit()
        self._gate.open()

    def take(self, label: str, fill: Callable[[], None]) -> None:
        """Have weights that came by another way than files filled in, and serve them; `on_commit` is not called.

        Args:
            label: The label that they run under.
            fill: Copies them into the parameters.

        Raises:
            EngineUnreachableError: Generations in flight do not end in time; nothing was touched.
            LoadFailedError: `fill` failed; nobody generates until a version is loaded from files.
        """
        self._gate.shut()
        self._attempt.load()
        try:
            fill()
        except Exception as error:
            raise LoadFailedError(f"weights were not taken in: {type(error).__name__}: {error}") from error
        self._label = label
        self._attempt.commit()
        self._gate.open()

    def own(self, label: str) -> None:
        """Call what was taken by the label that its files have, now that they are published."""
        self._label = label

    def disown(self) -> None:
        """Say that nobody can name what runs, so that a version is loaded from files before there is work."""
        self._label = UNKNOWN_LABEL

    def current_version(self) -> Running:
        """Say what was committed last."""
        return Running(self._label, self._gate.is_shut)

    def abort(self, last_good: WeightDirectory | None) -> None:
        """Read the last good version into the parameters again."""
        try:
            self._go_back(last_good)
        except (LoadFailedError, EngineDeadError) as error:
            dead = EngineDeadError(f"the model could not be brought back: {error.message}", hint=_DEAD)
            self._label, self._runs = UNKNOWN_LABEL, None
            self._gate.shut_for_good(dead)
            raise dead from error

    def _go_back(self, last_good: WeightDirectory | None) -> None:
        if last_good is None:
            self._attempt.require_untouched(_DEAD)
            self._gate.open()
            return
        self.load(last_good)
        self.commit(last_good)
        self._attempt.restored()

    def _fill(self, target: WeightDirectory) -> None:
        from syncd.transports.filesystem.load import check, load, offered  # noqa: PLC0415 - torch

        found = _or_failed(lambda: check(target, self._held, cast=self._cast))
        self.loaded = load(target, self._held, found, direct=self._direct)
        self._runs = offered(target)

    @staticmethod
    def _reset(on_commit: Callable[[WeightDirectory], object], target: WeightDirectory) -> None:
        try:
            on_commit(target)
        except Exception as error:
            raise LoadFailedError(f"on_commit failed: {type(error).__name__}: {error}") from error


def _or_failed(check: Callable[[], "Fit"]) -> "Fit":
    """Return what a check finds; what it refuses now it did not refuse in `prepare`, so it is a load that failed."""
    try:
        return check()
    except RefusedError as error:
        raise LoadFailedError(error.message, path=error.path) from error


def _model_of(found: Any, address: str) -> "torch.nn.Module":
    import torch  # noqa: PLC0415

    for _ in range(2):
        if isinstance(found, torch.nn.Module):
            return found
        if isinstance(getattr(found, "model", None), torch.nn.Module):
            return found.model  # type: ignore[no-any-return]
        if callable(found):
            found = found()
    raise ConfigError(f"{address} is no model, has none and returns none", hint=f"--hook transformers={FORM}")
