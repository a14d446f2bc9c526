"""A step directory as it is now: complete, filling or damaged, by whichever framework wrote it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from syncd.protocol.layout import parse_attempt_name

NATIVE = "syncd"  # the layout of steps written by this protocol; any other name is a foreign layout
UNKNOWN_LAYOUT = "unknown"  # the layout of a step that others wrote and that cannot be read


class StepState(StrEnum):
    FILLING = "filling"
    COMPLETE = "complete"
    DAMAGED = "damaged"


class StepShortcut(NamedTuple):
    """The shortcut of a step that is stored whole (docs/delta-format.md)."""

    # The step that it changes; None if the manifest does not say it in a way that can be read.
    parent: int | None
    size: int = 0  # bytes of its containers
    density: float | None = None  # the share of words that changed
    # Why nobody can use it, for people to read; the step's own files are whole all the same.
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    step: int  # the trainer's step
    directory: str  # its name in the job directory
    layout: str = NATIVE  # who wrote it: `syncd`, or the name of a foreign layout
    # filling: something is missing that may still come. complete: it can be loaded. damaged: it was sealed or
    # announced and is not what it must be, or can never become complete.
    state: StepState = StepState.FILLING
    payload: str = ""  # what an engine loads, relative to the job directory; the URI of a remote step
    kind: str = "weights"  # weights, delta, lora or remote
    digest: str = ""  # the manifest's digest, or the fingerprint of a foreign step; empty while filling
    present: int = 0  # writers (receipts) or shards that are there
    expected: int | None = None  # writers or shards that there must be, None while unknown
    size: int = 0  # bytes of what is there
    # For an attempt, when it and each file and directory in it were last modified, as the file system says:
    # sorted, in nanoseconds.
    touched: tuple[int, ...] = ()
    full: bool = False  # it is a full checkpoint
    parent: int | None = None  # for a delta, the step it changes
    whole_size: int = 0  # bytes that it would have if it were stored whole; `size` for what is
    # For a delta, the share of words that changed; None for what is stored whole.
    density: float | None = None
    shortcut: StepShortcut | None = None  # for a step that is stored whole, its shortcut, if it has one
    # How many files of weights are there, and how many there must be; None where `present` and `expected`
    # count them.
    shards: tuple[int, int] | None = None
    problem: str = ""  # what is missing or wrong, for people to read
    rejected: bool = False  # its content was read twice before a publish, and is not what its manifest says
    unreadable: bool = False  # it, or a part of it, cannot be read now, so its real state is unknown
    later: bool = False  # it was sealed by a later protocol than this code reads
    # What tells that its writer is done: itself (a manifest, a ready file), the job's marker, or time, when
    # it stops changing.
    announced_by: Literal["itself", "marker", "time"] = "itself"
    unchanged_for: float = 0.0  # seconds of the daemon's clock since any of this was seen to change
    # It became complete lately, below what is published: its writer may be about to go back to it.
    arriving: bool = False

    @property
    def is_attempt(self) -> bool:
        """Return whether it is an attempt to write the step, in its own directory, that nobody has sealed."""
        return parse_attempt_name(self.directory) is not None

    @property
    def is_native(self) -> bool:
        return self.layout == NATIVE
