"""Job directories that others wrote: read-only input of the same standing as this protocol's own steps.

`Layouts` tries each layout in turn and remembers what files were found to be, so that a look at a step that
has not changed costs its listings and one stat a file. docs/foreign.md has the table of layouts.

What is on disk is never trusted: names are parsed strictly, links are not followed, every read is bounded,
nothing is unpickled, and whatever is wrong becomes a step's state and problem. Only a file system that fails
raises.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncd.daemon.snapshot import Step
from syncd.protocol.disk import Disk
from syncd.protocol.layout import ACTOR, MANIFEST, RECEIPTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncd.daemon.foreign.layout import Layout
    from syncd.daemon.foreign.look import Memo


class Layouts:
    """All layouts, with the memory of what they saw."""

    def __init__(self, memo: "Memo | None" = None) -> None:
        self._memo = memo

    def step_of(self, name: str) -> int | None:
        """Return the step of a directory name of the job, None for any name that no layout has."""
        return step_of(name)

    def examine(
        self,
        disk: Disk,
        root: str,
        directory: str,
        step: int,
        progress: Callable[[], None] = lambda: None,
    ) -> Step | None:
        """Return the state of a step that others wrote, None for a directory that no layout knows.

        Cost: a listing of each directory that may hold weights, and one stat a file; contents only where a
        file has changed.

        Args:
            disk: The file system.
            root: The job directory.
            directory: The step's name in it, which a listing showed to be a directory.
            step: The step of that name.
            progress: Called again and again while this takes its time.

        Raises:
            OSError: The file system fails, other than by absence.
        """
        from syncd.daemon.foreign.look import Look, Memo  # noqa: PLC0415 - jobs of this protocol need none of it

        if self._memo is None:
            self._memo = Memo()
        look = Look(disk, self._memo, f"{root}/{directory}", progress)
        if look.has_file("", MANIFEST) or look.has_directory(f"{ACTOR}/{RECEIPTS}"):
            return None
        for layout in _layouts():
            if layout.step_of(directory) == step and (found := layout.examine(look, directory, step)):
                return found
        return None


def step_of(name: str) -> int | None:
    """Return the step of a directory name of the job, None for any name that no layout has."""
    if not any(map(str.isdecimal, name)):
        return None
    return next((step for layout in _layouts() if (step := layout.step_of(name)) is not None), None)


def _layouts() -> "Sequence[Layout]":
    from syncd.daemon.foreign.families import LAYOUTS  # noqa: PLC0415 - a tenth of the start of `syncd status`

    return LAYOUTS


def examine(disk: Disk, root: str, directory: str) -> Step | None:
    """Examine one directory of a job once, remembering nothing; see `Layouts.examine`."""
    step = step_of(directory)
    return None if step is None else Layouts().examine(disk, root, directory, step)
