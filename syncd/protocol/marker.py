"""The marker: a hint which step is newest. The manifest is the truth.

A reader must expect anything: no file, half a number, a step that does not exist yet, or one that goes back.
`MarkerReading.text` tells one state from the next, so that each is logged once.
"""

from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.layout import MAX_STEP
from syncd.protocol.obstacle import obstacle_to_reading

_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class MarkerReading:
    """What the marker said when it was read once.

    Args:
        step: The step it names, None when it names none.
        text: What it holds, shortened; empty when there is no marker.
        problem: Why it names no step: empty, missing, not a number, out of range, or what keeps it from being read.
        unreadable: This user may not read it, so it may name any step.
    """

    step: int | None
    text: str = ""
    problem: str = ""
    unreadable: bool = False


MISSING_MARKER = MarkerReading(None, problem="missing")


def parse_marker(data: bytes) -> MarkerReading:
    """Return what the bytes of a marker say; never raises."""
    text = data.strip(b" \t\r\n")
    shown = ascii(text[:40].decode("ascii", "replace"))[1:-1]
    if not text:
        return MarkerReading(None, shown, "empty")
    if not text.isdigit():
        return MarkerReading(
            None, shown, "negative" if text[:1] == b"-" and text[1:].isdigit() else "not a number"
        )
    if len(text) > len(str(MAX_STEP)) or int(text) > MAX_STEP:
        return MarkerReading(None, shown, "out of range")
    return MarkerReading(int(text), shown)


def read_marker(disk: Disk, path: str) -> MarkerReading:
    """Read the marker; what cannot be read is a reading with a problem.

    Raises:
        OSError: The file system itself fails, other than by absence.
    """
    try:
        return parse_marker(disk.read(path, _LIMIT))
    except MISSING:
        return MISSING_MARKER
    except CorruptDataError as error:
        return MarkerReading(None, problem=error.message)
    except PermissionError as error:
        return MarkerReading(None, problem=str(obstacle_to_reading(error, path)), unreadable=True)


def write_marker(disk: Disk, path: str, step: int, *, via: str | None = None) -> None:
    """Replace the marker, durably; the temporary file is in the directory `via`, as `Disk.replace` has it."""
    disk.replace(path, f"{step}".encode("ascii"), via=via)
