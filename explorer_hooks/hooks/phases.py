"""The phases of a load, for hooks that keep in mind what a failed one has touched."""

import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from explorer_hooks.hook import Hook
from syncd.errors import EngineDeadError, LoadFailedError, RefusedError
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.transports.base import WeightDirectory

RESTART = "restart the engine"


@contextlib.contextmanager
def restoring(failure: str, hint: str, path: object = None) -> Iterator[None]:
    try:
        yield
    except LoadFailedError as error:
        raise EngineDeadError(f"{failure}: {error.message}", path=path, hint=hint) from error


class LoadState:
    """Whether an engine's weights may differ from the last version that it served well.

    They may from `load` on, until the next `prepare`: by then the follower has accepted what was committed.
    """

    def __init__(self) -> None:
        self.touched = False
        self._committed = False

    def prepare(self) -> None:
        """Begin with a version; the last one was good if it was committed and not restored away."""
        if self._committed:
            self.touched = False

    def load(self) -> None:
        self.touched, self._committed = True, False

    def commit(self) -> None:
        self._committed = True

    def restored(self) -> None:
        self.touched = False
        self._committed = False

    @contextlib.contextmanager
    def restoring(self, hint: str) -> Iterator[None]:
        with restoring("the engine could not be restored", hint):
            yield
        self.restored()

    def require_untouched(self, hint: str) -> None:
        """Return if the engine still runs the last version that it served well."""
        if self.touched:
            raise EngineDeadError(
                "the engine was touched and there is no good version to go back to", hint=hint
            )


class PhaseHook(Hook):
    """A hook that has somebody else's program do each phase, and remembers what was committed last."""

    kinds: ClassVar[frozenset[str]] = frozenset({"weights", "lora", "remote", "foreign"})

    def __init__(self) -> None:
        self._state = LoadState()
        self._label: str | None = None

    @abstractmethod
    def _do(self, phase: str, target: WeightDirectory) -> None:
        """Have the program do `prepare`, `load` or `commit` of a version, or `abort` with the one to restore."""

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse a version of another kind or without a directory; the program may refuse it too."""
        require_loadable(target, self)
        self._state.prepare()
        self._do("prepare", target)

    def load(self, target: WeightDirectory) -> None:
        self._state.load()
        self._do("load", target)

    def commit(self, target: WeightDirectory) -> None:
        """Have the program serve it; the label is the new one from now on."""
        self._do("commit", target)
        self._keep(target.label)
        self._state.commit()

    def abort(self, last_good: WeightDirectory | None) -> None:
        if last_good is None:
            self._state.require_untouched(RESTART)
            return
        self._keep(UNKNOWN_LABEL)
        with self._state.restoring(RESTART):
            self._do("abort", last_good)
        self._keep(last_good.label)

    def _keep(self, label: str | None) -> None:
        self._label = label


def require_loadable(target: WeightDirectory, hook: Hook) -> None:
    """Return if a hook can load the kind of a version and its directory is on this host."""
    kind = target.version.kind
    if kind not in hook.kinds:
        loads = ", ".join(sorted(hook.kinds))
        raise RefusedError(
            f"version {target.label} is of kind {kind}, and the hook {hook.name} loads {loads}",
            hint="use the hook that fits what the trainer publishes",
        )
    if kind != "remote" and not os.path.isdir(target.path):
        raise RefusedError(
            f"the directory of version {target.label} is not on this host",
            path=target.path,
            hint="syncd ls JOB",
        )
