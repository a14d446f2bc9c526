"""What one step directory is, read once through the seam. Native steps here, those of others in `foreign`."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from syncd.daemon.snapshot import State, Step
from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.disk import MISSING, Disk, Entry, list_if_there
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, MANIFEST, RECEIPTS, step_name
from syncd.protocol.manifest import Manifest, decode_manifest, missing_files
from syncd.protocol.receipt import receipts_directory


def examine_native(disk: Disk, root: str, step: int, before: Step | None = None) -> Step | None:
    """Return the state of a step that this protocol wrote, None for a directory that it did not write.

    Cost: two listings, the manifest, and one stat a file that it names; contents are not read. The other files of a
    full checkpoint are looked at once, for their size.

    Args:
        disk: The file system.
        root: The job directory.
        step: The step.
        before: What it was when it was examined last.
    """
    directory = step_name(step)
    path = f"{root}/{directory}"
    names = {entry.name: entry for entry in list_if_there(disk, path)}
    full = FULL_CHECKPOINT in names
    if MANIFEST in names:
        return _sealed(disk, path, step, before, full=full)
    payload = {entry.name for entry in list_if_there(disk, f"{path}/{ACTOR}")}
    if RECEIPTS not in payload and (payload or set(names) - {ACTOR}):
        return None
    receipts = list_if_there(disk, receipts_directory(path)) if payload else []
    present, expected = count_receipts(receipts)
    problem = f"{present} of {expected} writers are done" if expected else "no writer is done yet"
    return Step(step, directory, present=present, expected=expected, full=full, problem=problem)


def count_receipts(entries: Iterable[Entry]) -> tuple[int, int | None]:
    """Return how many writers have left a receipt, and of how many, by the receipts' names alone."""
    sizes: Counter[int] = Counter()
    for entry in entries:
        writer, separator, size = entry.name.removesuffix(".json").partition("-of-")
        if entry.kind == "file" and separator and writer.isdecimal() and size.isdecimal():
            sizes[int(size)] += 1
    if not sizes:
        return 0, None
    expected, present = sizes.most_common(1)[0]
    return present, expected


def _sealed(disk: Disk, path: str, step: int, before: Step | None, *, full: bool) -> Step | None:
    try:
        manifest = decode_manifest(disk.read(f"{path}/{MANIFEST}"), f"{path}/{MANIFEST}")
        wrong = missing_files(disk, path, manifest)
    except MISSING:
        return Step(step, step_name(step), full=full, problem="the manifest has just gone")
    except CorruptDataError as error:
        later = isinstance(error, ProtocolTooNewError)
        return Step(step, step_name(step), state=State.DAMAGED, full=full, problem=error.message, later=later)
    if manifest.step != step:
        wrong = [f"the manifest is of step {manifest.step}"]
    found = _of_manifest(replace(manifest, step=step, digest=manifest.digest), wrong, full=full)
    if not full:
        return found
    # Its mark comes after its files: from then on it does not change.
    same = before is not None and before.full and before.digest == found.digest
    return replace(found, size=before.size if before and same else tree_size(disk, path))


def tree_size(disk: Disk, path: str) -> int:
    """Return the bytes of all files below a directory, following no link."""
    total = 0
    for entry in list_if_there(disk, path):
        child = f"{path}/{entry.name}"
        with contextlib.suppress(*MISSING):
            total += tree_size(disk, child) if entry.kind == "directory" else disk.stat(child).size
    return total


def _of_manifest(manifest: Manifest, wrong: list[str], *, full: bool) -> Step:
    directory = step_name(manifest.step)
    return Step(
        step=manifest.step,
        directory=directory,
        state=State.DAMAGED if wrong else State.COMPLETE,
        payload=manifest.uri or f"{directory}/{manifest.payload}",
        kind=manifest.kind,
        digest=manifest.digest,
        present=manifest.world_size,
        expected=manifest.world_size,
        size=manifest.size,
        full=full,
        parent=manifest.parent,
        problem=wrong[0] if wrong else "",
    )
