"""Simulated ranks that store deltas and shortcuts, with the real codec, as changes of what they sealed last."""

from random import Random
from typing import NamedTuple

from simulator.explorer import Loaded
from syncd.errors import SyncdError
from syncd.protocol.delta import ENCODING, DeltaTable, Target, tiles
from syncd.protocol.digest import digest_bytes
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import ACTOR, SHORTCUT, Job, delta_name
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import Changes, FileRecord, Receipt
from syncd.protocol.safetensors import parse_header
from syncd.protocol.tile_digests import shard_roots
from syncd.protocol.writer import StepWriter
from syncd.transports.delta import encode
from syncd.transports.delta.publish import NewContainer

_DELTA, _SHORTCUT = 0.6, 0.8


class Sealed(NamedTuple):
    """The step that a run sealed last: its manifest, and the shard files that a full save of it has."""

    manifest: Manifest
    contents: Loaded


class Plan(NamedTuple):
    """How one step is stored: as a delta of a step, whole with the shortcut from it, or whole without a parent."""

    parent: Sealed | None = None
    is_delta: bool = False


def draw_plan(random: Random, job: Job, last: Sealed | None) -> Plan:
    """Decide how the next step is stored; whole if the chain of the last one is no longer there."""
    chance = random.random()
    if last is None or chance > _SHORTCUT:
        return Plan()
    try:
        chain = read_chain(job, last.manifest.step)
    except (SyncdError, *MISSING):
        return Plan()
    if chain[0].digest != last.manifest.digest:
        return Plan()
    return Plan(last, is_delta=chance < _DELTA)


def write_part(writer: StepWriter, plan: Plan, rank: int, name: str, content: bytes) -> Receipt:
    """Write one rank's part of a step, and its receipt.

    Args:
        writer: Of the step.
        plan: How it is stored.
        rank: This rank, from 1.
        name: The name of its shard file.
        content: The shard file that a full save has.
    """
    if plan.parent is None:
        return writer.receipt(rank, [_write(writer, name, content, 1)])
    table, container = _container(plan.parent.contents[name], name, content, rank)
    directory = ACTOR if plan.is_delta else SHORTCUT
    stored = _write(writer, f"{directory}/{delta_name(rank, writer.world_size)}", container, 3)
    parent, frames = plan.parent.manifest, table.frames
    counts = sum(frame.changed for frame in frames), sum(frame.words for frame in frames)
    shard = FileRecord(name, len(content), digest_bytes(content), 1)
    lists = {"shards": (shard,)} if plan.is_delta else {"containers": (stored,)}
    changes = Changes(parent.step, parent.digest, ENCODING, *counts, **lists)
    own = stored if plan.is_delta else _write(writer, name, content, 1)
    return writer.receipt(rank, [own], roots=shard_roots([table]).values(), changes=changes)


def stored_files(plan: Plan, rank: int, world_size: int, name: str, content: bytes) -> dict[str, bytes]:
    """Return what `write_part` is about to write, by name."""
    if plan.parent is None:
        return {name: content}
    _, container = _container(plan.parent.contents[name], name, content, rank)
    if plan.is_delta:
        return {f"{ACTOR}/{delta_name(rank, world_size)}": container}
    return {name: content, f"{SHORTCUT}/{delta_name(rank, world_size)}": container}


def _container(old: bytes, name: str, content: bytes, rank: int) -> tuple[DeltaTable, bytes]:
    targets = (Target(name, len(content)),)
    with NewContainer(targets, rank) as new:
        for tile in tiles(parse_header(content, len(content))):
            place = slice(tile.offset, tile.offset + tile.length)
            new.add(encode(old[place], content[place], width=tile.width, offset=tile.offset))
        return DeltaTable(targets, tuple(new.frames), 0), b"".join(new.pieces())


def _write(writer: StepWriter, name: str, content: bytes, tensors: int) -> FileRecord:
    return writer.write(name, iter((content[:40], content[40:])), tensors=tensors)
