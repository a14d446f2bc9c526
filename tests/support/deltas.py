"""Exports of a small model as a trainer writes them, each a few changed words after the one before."""

import json
import os
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from syncd.protocol.delta import ENCODING, DeltaTable, Target
from syncd.protocol.digest import digest_bytes
from syncd.protocol.layout import ACTOR, SHORTCUT, Job, delta_name
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.receipt import Changes, FileRecord, ShardRoots
from syncd.protocol.tile_digests import shard_roots
from syncd.protocol.writer import StepWriter
from syncd.transports.delta import encode
from syncd.transports.delta.chain import Chain
from syncd.transports.delta.publish import NewContainer

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class SmallModel:
    """Two shards: float16 tensors (words of two bytes), a float32 one, flags, an empty tensor, odd sizes.

    Args:
        seed: Of its weights.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        normal = self._random.standard_normal
        self.shards: dict[str, dict[str, Any]] = {
            SHARDS[0]: {"a": (normal((61, 371)) * 0.02).astype(np.float16), "norm": np.ones(13, np.float32)},
            SHARDS[1]: {
                "b": (normal(90_001) * 0.02).astype(np.float16),
                "flags": np.arange(7) % 2 == 0,
                "nothing": np.zeros((0, 4), np.float32),
            },
        }
        self.tokenizer = "{}"

    def train(self, share: float = 0.02) -> "SmallModel":
        """Change this share of the words of two bytes by one unit, and one float32."""
        for tensors in self.shards.values():
            for tensor in tensors.values():
                if tensor.dtype == np.float16:
                    words = tensor.view(np.uint16)
                    words[self._random.random(words.shape) < share] += 1
        self.shards[SHARDS[0]]["norm"][self._random.integers(13)] += np.float32(1e-3)
        return self

    def export(self, directory: object) -> str:
        """Write the model directory and return its path."""
        path = str(directory)
        os.makedirs(path)
        for name, tensors in self.shards.items():
            save_file(tensors, f"{path}/{name}", metadata={"format": "pt"})
        places = {tensor: name for name, tensors in self.shards.items() for tensor in tensors}
        texts = {INDEX: json.dumps({"weight_map": places}), "config.json": '{"a": 1}'}
        for name, text in {**texts, "tokenizer.json": self.tokenizer}.items():
            with open(f"{path}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
        return path


def write_keyframe(job: Job, step: int, export: str, parent: int, **changes: Any) -> Manifest:
    """Write an export as a trainer of two ranks does: whole, with the shortcut from a step before; announce it.

    Args:
        job: The job.
        step: The step to become.
        export: The directory of the export.
        parent: The step that the shortcut changes.
        **changes: Other values for fields of each writer's part of the shortcut.
    """
    return _written(job, step, export, parent, changes, whole=True)


def write_delta(job: Job, step: int, export: str, parent: int, **changes: Any) -> Manifest:
    """Write an export as a trainer of two ranks writes a delta; announce it. Arguments as `write_keyframe`."""
    return _written(job, step, export, parent, changes, whole=False)


def _written(job: Job, step: int, export: str, parent: int, more: dict[str, Any], *, whole: bool) -> Manifest:
    writer, before = (
        StepWriter(job, step, len(SHARDS), f"save{step}"),
        read_manifest(job.disk, job.step(parent)),
    )
    writer.begin()
    for number, name in enumerate(SHARDS, 1):
        with open(f"{export}/{name}", "rb") as file:
            content = file.read()
        record = next(one for one in before.whole_shards if one.name.endswith(name))
        stored, roots, counts = _container(
            writer, Chain(job, read_chain(job, parent)), record, content, number, whole=whole
        )
        shard = _shard(writer, record, content, whole=whole)
        files = _companions(writer, export) if number == 1 else []
        origin = {"parent": parent, "parent_digest": before.digest, "encoding": ENCODING, **counts}
        lists = {"containers": (stored,)} if whole else {"shards": (shard,), "files": tuple(files)}
        part = Changes(**{**origin, **lists, **more})
        writer.receipt(number, [shard if whole else stored], files, roots=roots, changes=part)
    manifest = writer.seal()
    writer.announce()
    assert manifest is not None
    return manifest


def _container(
    writer: StepWriter, chain: Chain, record: FileRecord, content: bytes, number: int, *, whole: bool
) -> tuple[FileRecord, list[ShardRoots], dict[str, int]]:
    targets = [Target(record.name, record.size)]
    with NewContainer(targets, number) as new:
        for tile, old in chain.tiles(record):
            piece = content[tile.offset : tile.offset + tile.length]
            new.add(encode(old, piece, width=tile.width, offset=tile.offset))
        name = f"{SHORTCUT if whole else ACTOR}/{delta_name(number, len(SHARDS))}"
        stored = writer.write(name, new.pieces(), tensors=3)
        roots = shard_roots([DeltaTable(tuple(targets), tuple(new.frames), 0)])
        counts = {
            "changed": sum(frame.changed for frame in new.frames),
            "elements": sum(frame.words for frame in new.frames),
        }
    return stored, list(roots.values()), counts


def _shard(writer: StepWriter, record: FileRecord, content: bytes, *, whole: bool) -> FileRecord:
    """Write a shard file of a whole step; of a delta, return its record alone."""
    if whole:
        return writer.write(record.name, content, record.tensors)
    return record._replace(digest=digest_bytes(content))


def _companions(writer: StepWriter, export: str) -> list[FileRecord]:
    found = []
    for name in sorted(set(os.listdir(export)) - set(SHARDS)):
        with open(f"{export}/{name}", "rb") as file:
            found.append(writer.write(f"{ACTOR}/{name}", file.read()))
    return found


def contents(directory: object) -> dict[str, bytes]:
    """Return each file below a directory by its path, hidden ones too."""
    found = {}
    for place, _, names in os.walk(str(directory)):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, str(directory))] = file.read()
    return found


def contents_digest(directory: object) -> str:
    """Return a digest of the names and bytes of all files below a directory."""
    found = sorted(contents(directory).items())
    return digest_bytes(b"".join(f"{name} {len(data)}\n".encode() + data for name, data in found))
