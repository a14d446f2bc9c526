"""Pins: steps that a person keeps for good, one file each."""

from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.documents import SMALL_LIMIT, encode, read_document
from syncd.protocol.layout import Job, parse_step_name, step_name
from syncd.protocol.obstacle import obstacle_to_reading


@dataclass(frozen=True, slots=True)
class Pin:
    """A step that retention must keep, and why."""

    step: int
    reason: str = ""
    pinned_at: float = 0.0


def pin_path(job: Job, step: int) -> str:
    """Return the file of a pin."""
    return f"{job.pins}/{step_name(step)}.json"


def write_pin(job: Job, pin: Pin) -> None:
    """Pin a step, durably."""
    job.disk.make_directory(job.pins)
    document = {"step": pin.step, "reason": pin.reason, "pinned_at": pin.pinned_at}
    job.disk.replace(pin_path(job, pin.step), encode(document))


def remove_pin(job: Job, step: int) -> bool:
    """Unpin a step, and say whether it was pinned."""
    try:
        job.disk.unlink(pin_path(job, step))
    except MISSING:
        return False
    return True


def read_pins(job: Job, unreadable: dict[str, str] | None = None) -> dict[int, Pin]:
    """Return the pinned steps. The name alone pins: a file that is damaged or cannot be read must not cost a step.

    Args:
        job: The job.
        unreadable: Takes what is wrong with each file that is damaged or of a later protocol, by path.

    Raises:
        OSError: The directory cannot be listed, or the file system fails.
    """
    pins = {}
    for entry in list_if_there(job.disk, job.pins):
        step = parse_step_name(entry.name.removesuffix(".json"))
        if step is None or entry.kind != "file" or not entry.name.endswith(".json"):
            continue
        pins[step] = _read(job, f"{job.pins}/{entry.name}", step, {} if unreadable is None else unreadable)
    return pins


def _read(job: Job, path: str, step: int, unreadable: dict[str, str]) -> Pin:
    try:
        fields = read_document(job.disk, path, SMALL_LIMIT)
        return Pin(step, fields.text("reason", ""), fields.number("pinned_at"))
    except MISSING:
        return Pin(step)
    except CorruptDataError as error:
        unreadable[path] = error.message
        return Pin(step)
    except OSError as error:
        if (obstacle := obstacle_to_reading(error, path)) is None:
            raise
        return Pin(step, f"the reason cannot be read: {obstacle}")
