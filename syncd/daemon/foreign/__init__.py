"""Job directories that others wrote: read-only input of the same standing as this protocol's own steps.

`Layouts` tries each layout in turn and remembers what files were found to be, so that a look at a step that
has not changed costs its listings and one stat a file. docs/foreign.md has the table of layouts.

What is on disk is never trusted: names are parsed strictly, links are not followed, every read is bounded,
nothing is unpickled, and whatever is wrong becomes a step's state and problem. Only a file system that fails
raises.
"""

from syncd.daemon.foreign.huggingface import HUGGINGFACE
from syncd.daemon.foreign.layout import Layout
from syncd.daemon.foreign.look import Look, Memo
from syncd.daemon.foreign.prime import PRIME
from syncd.daemon.foreign.tinker import TINKER
from syncd.daemon.foreign.verl import ADAPTER, EXPORT, FSDP, MEGATRON, TRINITY
from syncd.daemon.snapshot import Step
from syncd.protocol.disk import Disk
from syncd.protocol.layout import ACTOR, MANIFEST, RECEIPTS

__all__ = ["LAYOUTS", "Layout", "Layouts", "Memo", "examine", "step_of"]

LAYOUTS = (TINKER, TRINITY, FSDP, MEGATRON, EXPORT, ADAPTER, PRIME, HUGGINGFACE)
"""Every layout; the first that knows a directory has it."""


class Layouts:
    """All layouts, with the memory of what they saw."""

    def __init__(self, memo: Memo | None = None) -> None:
        self._memo = Memo() if memo is None else memo

    def step_of(self, name: str) -> int | None:
        """Return the step of a directory name of the job, None for any name that no layout has."""
        return step_of(name)

    def examine(self, disk: Disk, root: str, directory: str, step: int) -> Step | None:
        """Return the state of a step that others wrote, None for a directory that no layout knows.

        Cost: a listing of each directory that may hold weights, and one stat a file; contents only where a
        file has changed.

        Args:
            disk: The file system.
            root: The job directory.
            directory: The step's name in it, which a listing showed to be a directory.
            step: The step of that name.

        Raises:
            OSError: The file system fails, other than by absence.
        """
        look = Look(disk, self._memo, f"{root}/{directory}")
        if look.has_file("", MANIFEST) or look.has_directory(f"{ACTOR}/{RECEIPTS}"):
            return None
        for layout in LAYOUTS:
            if layout.step_of(directory) == step and (found := layout.examine(look, directory, step)):
                return found
        return None


def step_of(name: str) -> int | None:
    """Return the step of a directory name of the job, None for any name that no layout has."""
    return next((step for layout in LAYOUTS if (step := layout.step_of(name)) is not None), None)


def examine(disk: Disk, root: str, directory: str) -> Step | None:
    """Examine one directory of a job once, remembering nothing; see `Layouts.examine`."""
    step = step_of(directory)
    return None if step is None else Layouts().examine(disk, root, directory, step)
