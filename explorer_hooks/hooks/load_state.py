"""What hooks share: what they refuse before the engine is touched, and whether it was touched since."""

import os
from collections.abc import Collection

from syncd.errors import EngineDeadError, RefusedError
from syncd.transports.base import WeightDirectory


def require_loadable(target: WeightDirectory, kinds: Collection[str], name: str) -> None:
    """Refuse what a hook can never load.

    Args:
        target: The version.
        kinds: The kinds that the hook can load.
        name: The hook, for the error.

    Raises:
        RefusedError: It is of another kind, or its directory is not there.
    """
    version = target.version
    if version.kind not in kinds:
        known = ", ".join(sorted(kinds))
        raise RefusedError(f"version {target.label} is of kind {version.kind}; {name} loads {known}")
    if version.kind != "remote" and not os.path.isdir(target.path):
        raise RefusedError(f"version {target.label} has no directory", path=target.path)


class Attempt:
    """Whether an engine's weights may be something else than what it last served well.

    From `load` on they may be, until the next `prepare` shows that what was committed was believed.
    """

    def __init__(self) -> None:
        self.touched = False
        self._committed = False

    def prepare(self) -> None:
        """Begin with a version; the last one was good if it was committed and not taken back."""
        if self._committed:
            self.touched = False

    def load(self) -> None:
        """Note that the engine's weights are about to change."""
        self.touched, self._committed = True, False

    def commit(self) -> None:
        """Note that the version is served."""
        self._committed = True

    def restored(self) -> None:
        """Note that the engine is back on a good version."""
        self.touched = False
        self._committed = False

    def require_untouched(self, hint: str) -> None:
        """Return if the engine still runs what it last served well, there being nothing to go back to.

        Raises:
            EngineDeadError: It does not, or nobody can tell.
        """
        if self.touched:
            raise EngineDeadError(
                "the engine was touched and there is no good version to go back to", hint=hint
            )
