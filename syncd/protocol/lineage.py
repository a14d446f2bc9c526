"""The lineage of a delta: the chain of manifests down to its keyframe, and the proof that each link fits the next.

No weight is read. Each link names its parent by the digest of the parent's manifest; the root before is the parent's
root after; files have the same names and sizes. The tables of the containers have the digests that the roots are
made of, so what is applied to a tile is compared with what the chain says of it.

The shortcut of a step that is stored whole is proved in the same way; nothing that is wrong with it damages the step.
"""

import contextlib
from collections.abc import Callable, Sequence

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta import ENCODING, DeltaTable, Target, read_table
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.digest import is_digest
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest, incompleteness, missing_files, missing_records, read_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.tile_digests import roots_of

CHAIN_LIMIT = 1024  # the most deltas between a step and its keyframe


def materialise_hint(job: Job, step: int) -> str:
    """Return the command that makes a directory of a delta, for whoever cannot read one."""
    return f"syncd materialise {job.root} {step} --to DIR  # a whole model directory"


def read_chain(job: Job, step: int, *, shortcut: bool = False) -> list[Manifest]:
    """Return the manifests of a step and of what it is stored as changes of: the step first, its keyframe last.

    With `shortcut`, go by the step's shortcut to its parent, too.
    """
    try:
        chain = [read_manifest(job.disk, job.step(step))]
    except MISSING:
        hint = f"syncd ls {job.root}"
        raise UsageError(f"there is no step {step} with a manifest", path=job.step(step), hint=hint) from None
    if chain[0].kind not in ("weights", "delta"):
        raise UsageError(f"step {step} is of kind {chain[0].kind}, not weights or delta", path=job.step(step))
    if shortcut and chain[0].shortcut is None:
        raise UsageError(f"step {step} has no shortcut", path=job.step(step))
    return chain + ancestors(job, chain[0], shortcut=shortcut)


def ancestors(job: Job, manifest: Manifest, *, shortcut: bool = False) -> list[Manifest]:
    """Return the manifests of what a step is stored as changes of, its parent first; none for a step stored whole.

    With `shortcut`, go by the step's shortcut to its parent, too.
    """
    manifests: list[Manifest] = []
    if shortcut and manifest.shortcut is not None and manifest.changes is not None:
        manifest = read_parent(job, manifest, manifest.changes)
        manifests.append(manifest)
    while manifest.delta is not None:
        if len(manifests) == CHAIN_LIMIT:
            raise CorruptDataError(f"a chain of more than {CHAIN_LIMIT} deltas", path=job.step(manifest.step))
        manifest = read_parent(job, manifest, manifest.delta)
        manifests.append(manifest)
    return manifests


def read_parent(job: Job, manifest: Manifest, delta: DeltaHeader) -> Manifest:
    """Return the manifest of the step that a step is stored as changes of."""
    path = job.step(delta.parent)
    try:
        parent = read_manifest(job.disk, path)
        wrong = missing_files(job.disk, path, parent)
    except MISSING:
        raise _broken(job, manifest, f"step {delta.parent}, which does not exist") from None
    if problem := link_problem(delta, manifest.files, parent) or (wrong[0] if wrong else ""):
        raise _broken(job, manifest, f"step {delta.parent}: {problem}")
    return parent


def _broken(job: Job, manifest: Manifest, why: str) -> CorruptDataError:
    message = f"step {manifest.step} is stored as changes of {why}"
    return CorruptDataError(message, path=job.step(manifest.step), hint=f"syncd ls {job.root}")


def link_problem(delta: DeltaHeader, stored: Sequence[FileRecord], parent: Manifest) -> str:
    """Return why a delta does not fit its parent, empty when it does; `stored` are its files beside weights."""
    if parent.kind not in ("weights", "delta"):
        return f"it is of kind {parent.kind}"
    if parent.digest != delta.parent_digest:
        return "it was written again, or its manifest is another one"
    root = parent.delta.root_after if parent.delta else parent.root
    if root is not None and root != delta.root_before:
        return "its root digest is not the one that the changes start from"
    if _layout(parent.whole_shards) != _layout(delta.shards):
        return "its shard files have other names or sizes"
    inherited = set(delta.files) - set(stored)
    if lost := inherited - set(parent.whole_files):
        return f"it does not have {min(lost).name}"
    return ""


def _layout(shards: Sequence[FileRecord]) -> set[tuple[str, int, int]]:
    return {(record.name, record.size, record.tensors) for record in shards}


def delta_problems(
    job: Job, manifest: Manifest, *, tables: bool, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return what is wrong with the lineage of a step, nothing when it is proved or the step is stored whole.

    With `tables`, read those of the step's containers too, so that its roots follow from its frames.
    """
    if manifest.delta is None:
        return []
    try:
        if problem := header_problem(manifest.delta):
            return [problem]
        ancestors(job, manifest)
        if tables:
            check_tables(manifest, containers(job, manifest, progress))
    except CorruptDataError as error:
        return [error.message]
    return []


def shortcut_problems(
    job: Job, manifest: Manifest, *, tables: bool, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return why nobody can use the shortcut of a step, nothing when it is proved or there is none.

    A parent that is no longer there proves nothing and is no fault: a reader may still have its files. `tables` is as
    for `delta_problems`.
    """
    changes = manifest.changes
    if manifest.shortcut is None or changes is None:
        return [manifest.shortcut_problem] if manifest.shortcut_problem else []
    if wrong := missing_records(job.disk, job.step(manifest.step), manifest.containers):
        return wrong
    try:
        if problem := header_problem(changes):
            return [problem]
        with contextlib.suppress(*MISSING):
            parent = read_manifest(job.disk, job.step(changes.parent))
            if problem := link_problem(changes, manifest.files, parent):
                return [f"it changes step {changes.parent}: {problem}"]
        if tables:
            check_tables(manifest, containers(job, manifest, progress))
    except (*MISSING, CorruptDataError) as error:
        return [str(error)]
    return []


def header_problem(delta: DeltaHeader) -> str:
    """Return why this release cannot read a delta with such a header, empty when it can."""
    if delta.encoding != ENCODING:
        return f"a delta in the encoding {delta.encoding[:80]!r}, which this release does not know: upgrade syncd"
    if not (is_digest(delta.root_before) and is_digest(delta.root_after)):
        return "a delta without roots"
    if problem := incompleteness("weights", delta.shards):
        return f"a delta whose files are no model: {problem}"
    names = [record.name for record in (*delta.shards, *delta.files)]
    return "a delta that makes one file twice" if len(set(names)) != len(names) else ""


def containers(job: Job, manifest: Manifest, progress: Callable[[], None] = lambda: None) -> list[DeltaTable]:
    """Return the tables of the containers of a delta or a shortcut, in the order of its manifest."""
    path = job.step(manifest.step)
    return [read_table(job.disk, f"{path}/{record.name}", progress) for record in manifest.containers]


def check_tables(manifest: Manifest, tables: Sequence[DeltaTable]) -> None:
    """Return if the tables of a delta or a shortcut say what its manifest says."""
    delta = manifest.changes
    targets = sorted(target for table in tables for target in table.targets)
    frames = [frame for table in tables for frame in table.frames]
    counts = sum(frame.changed for frame in frames), sum(frame.words for frame in frames)
    if delta is None or targets != sorted(Target(record.name, record.size) for record in delta.shards):
        problem = "the containers make other files than the manifest says"
    elif counts != (delta.changed, delta.elements):
        problem = "the frames count other words than the manifest says"
    elif roots_of(tables) != (delta.root_before, delta.root_after):
        problem = "the digests of the frames do not match the roots in the manifest"
    else:
        return
    raise CorruptDataError(f"step {manifest.step}: {problem}")
