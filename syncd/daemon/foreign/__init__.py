"""Steps that other frameworks wrote: read-only input of the same standing as this protocol's own steps.

`ForeignLayouts` tries each layout in turn. It caches what each file was found to be, so that a scan of a step that
has not changed costs its listings and one stat a file. docs/other-frameworks.md has the table of layouts.

What is on disk is never trusted: names are parsed strictly, links are not followed, every read is bounded, nothing is
unpickled. Whatever is wrong becomes the step's state and problem. Only a failure of the file system raises.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncd.protocol.disk import Disk
from syncd.protocol.layout import ACTOR, MANIFEST, RECEIPTS
from syncd.protocol.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncd.daemon.foreign.directory import VerdictCache
    from syncd.daemon.foreign.frameworks import ForeignLayout


class ForeignLayouts:
    _cache: "VerdictCache | None" = None

    def examine(
        self,
        disk: Disk,
        root: str,
        name: str,
        step: int,
        progress: Callable[[], None] = lambda: None,
    ) -> Step | None:
        """Return the state of a step that another framework wrote, None for a directory that no layout matches.

        Cost: a listing of each directory that may hold weights, and one stat a file; contents only where a file has
        changed. A listing has shown that `name` is a directory.
        """
        # Imported here: jobs that hold only this protocol's steps need none of it.
        from syncd.daemon.foreign.directory import StepDirectory, VerdictCache  # noqa: PLC0415

        if self._cache is None:
            self._cache = VerdictCache()
        directory = StepDirectory(disk, self._cache, f"{root}/{name}", progress)
        if directory.has_file("", MANIFEST) or directory.has_directory(f"{ACTOR}/{RECEIPTS}"):
            return None
        for layout in _layouts():
            if layout.step_of(name) == step and (examined := layout.examine(directory, name, step)):
                return examined
        return None


def step_of(name: str) -> int | None:
    """Return the step of a directory name of the job, None for any name that no layout has."""
    if not any(map(str.isdecimal, name)):
        return None
    return next((step for layout in _layouts() if (step := layout.step_of(name)) is not None), None)


def _layouts() -> "Sequence[ForeignLayout]":
    # Imported here: it takes a tenth of the start of `syncd status`.
    from syncd.daemon.foreign.frameworks import LAYOUTS  # noqa: PLC0415

    return LAYOUTS
