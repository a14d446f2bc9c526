"""Versions as a follower hands them to a hook, made from any directory of safetensors."""

import hashlib
import os

from syncd.protocol.digest import digest_file
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import read_header
from syncd.protocol.version import Pair, Version, engine_label
from syncd.transports.base import WeightDirectory
from syncd.transports.tensors import TensorMeta

DISK = LocalDisk()


def target_of(directory, pair: Pair, *, kind: str = "weights", verified: bool = True) -> WeightDirectory:
    """Return the target that a directory of safetensors is, with sizes and digests of what lies there now."""
    directory = str(directory)
    shards, tensors = [], {}
    for name in sorted(name for name in os.listdir(directory) if name.endswith(".safetensors")):
        path = f"{directory}/{name}"
        header = read_header(DISK, path)
        digest, size = digest_file(DISK, path)
        shards.append(FileRecord(name, size, digest, len(header.tensors)))
        tensors |= {one.name: TensorMeta(one.dtype, one.shape) for one in header.tensors.values()}
    version = Version(pair[0], pair[1], kind, f"global_step_{pair[1]}/actor", digest_of(pair))
    return WeightDirectory(version, directory, tuple(shards), tensors, verified)


def digest_of(pair: Pair) -> str:
    """Return the digest of the manifest that `target_of` gives a pair."""
    return f"sha256:{hashlib.sha256(repr(pair).encode()).hexdigest()}"


def label(step: int, generation: int = 1) -> str:
    """Return what an engine is told of the version that `target_of` gives a pair."""
    pair = generation, step
    return engine_label(pair, digest_of(pair))
