"""Pins: steps that a person keeps for good, one file each."""

from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.documents import SMALL_LIMIT, encode, read_document
from syncd.protocol.layout import Job, parse_step_name, step_name


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
    """Return the pinned steps. The name alone pins: a damaged file must not cost a step.

    Args:
        job: The job.
        unreadable: Takes what is wrong with each file that cannot be read, by path.
    """
    pins = {}
    for entry in list_if_there(job.disk, job.pins):
        step = parse_step_name(entry.name.removesuffix(".json"))
        if step is None or entry.kind != "file" or not entry.name.endswith(".json"):
            continue
        pins[step] = Pin(step)
        path = f"{job.pins}/{entry.name}"
        try:
            fields = read_document(job.disk, path, SMALL_LIMIT)
            pins[step] = Pin(step, fields.text("reason", ""), fields.number("pinned_at"))
        except MISSING:
            continue
        except CorruptDataError as error:
            if unreadable is not None:
                unreadable[path] = error.message
    return pins
