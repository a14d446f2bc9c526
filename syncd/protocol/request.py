"""Requests and pins: what people and trainers ask of the daemon, one file each.

The daemon removes a request once it is carried out or refused; a pin stays until a person removes it.

rollback: explorers go back to an earlier complete step, as a new generation.
vacate: a trainer that has gone back wants to write a step again whose directory still exists.
pin: retention must keep a step.
"""

import contextlib
import uuid
from dataclasses import asdict, dataclass, field

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import SMALL_LIMIT, list_documents, read_document, record_from, write_document
from syncd.protocol.entry_problem import required_read_problem
from syncd.protocol.layout import Job, is_identity, parse_step_name, step_name

KINDS = ("rollback", "vacate")


@dataclass(frozen=True, slots=True)
class Request:
    kind: str  # one of `KINDS`
    step: int  # the step it is about
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)  # its name, unique
    reason: str = ""  # for people to read
    asked_at: float = 0.0  # seconds since the epoch on the asker's clock; requests are served in this order
    # To vacate: the digest of the manifest that is in the way, so that what is written there afterwards is
    # not meant; empty for whatever is sealed there.
    digest: str = ""


def request_path(job: Job, identity: str) -> str:
    return f"{job.requests}/{identity}.json"


def write_request(job: Job, request: Request) -> None:
    write_document(job.disk, request_path(job, request.identity), asdict(request))


def read_requests(job: Job) -> tuple[Request, ...]:
    """Return the open requests in the order of asking; files that are not requests are passed over."""
    return read_requests_and_problems(job)[0]


def read_requests_and_problems(
    job: Job, unreadable: dict[str, str] | None = None
) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    """Return the open requests as `read_requests` does, and what keeps others from being read.

    `unreadable` takes what is wrong with each file that is damaged or of a later protocol, by path.
    """
    requests, problems = [], []
    for identity, path in list_documents(job.disk, job.requests):
        if is_identity(identity):
            try:
                requests.append(_read_request(job, identity, path))
            except MISSING:
                continue
            except CorruptDataError as error:
                if unreadable is not None:
                    unreadable[path] = error.message
            except Exception as error:  # noqa: BLE001 - one file costs itself only
                problems.append(str(required_read_problem(error, path)))
    return tuple(sorted(requests, key=lambda request: (request.asked_at, request.identity))), tuple(problems)


def _read_request(job: Job, identity: str, path: str) -> Request:
    fields = read_document(job.disk, path, SMALL_LIMIT)
    if fields.text("kind") not in KINDS or fields.text("identity") != identity:
        raise fields.wrong("kind", f"one of {', '.join(KINDS)}")
    return record_from(Request, fields, "asked_at")


def remove_request(job: Job, identity: str) -> None:
    """Remove a request that is carried out, refused or withdrawn."""
    with contextlib.suppress(*MISSING):
        job.disk.unlink(request_path(job, identity))


@dataclass(frozen=True, slots=True)
class Pin:
    step: int
    reason: str = ""
    pinned_at: float = 0.0


def pin_path(job: Job, step: int) -> str:
    return f"{job.pins}/{step_name(step)}.json"


def write_pin(job: Job, pin: Pin) -> None:
    write_document(job.disk, pin_path(job, pin.step), asdict(pin))


def remove_pin(job: Job, step: int) -> bool:
    """Unpin a step, and return whether it was pinned."""
    try:
        job.disk.unlink(pin_path(job, step))
    except MISSING:
        return False
    return True


def read_pins(job: Job, unreadable: dict[str, str] | None = None) -> dict[int, Pin]:
    """Return the pinned steps. The name alone pins: a file that is damaged or cannot be read must not cost a step.

    `unreadable` takes what is wrong with each file that is damaged or of a later protocol, by path.
    """
    pins = {}
    for name, path in list_documents(job.disk, job.pins):
        step = parse_step_name(name)
        if step is not None:
            pins[step] = _read_pin(job, path, step, {} if unreadable is None else unreadable)
    return pins


def _read_pin(job: Job, path: str, step: int, unreadable: dict[str, str]) -> Pin:
    try:
        fields = read_document(job.disk, path, SMALL_LIMIT)
        return record_from(Pin, fields, "pinned_at", step=step)
    except MISSING:
        return Pin(step)
    except CorruptDataError as error:
        unreadable[path] = error.message
        return Pin(step)
    except Exception as error:  # noqa: BLE001 - one file costs itself only
        return Pin(step, f"the reason cannot be read: {required_read_problem(error, path)}")
