"""Step directories as other trainers leave them: real safetensors bytes, and archives like torch.save's."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import save

from syncd.daemon.foreign import ForeignLayouts, step_of
from syncd.protocol.disk import Disk
from syncd.protocol.step import Step

CONFIG = json.dumps({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8}).encode()
ADAPTER_CONFIG = json.dumps({"peft_type": "LORA", "r": 8}).encode()


def tensors(seed: int = 0, prefix: str = "model.layers") -> bytes:
    weights = np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)
    return save({f"{prefix}.{seed}.weight": weights, f"{prefix}.{seed}.bias": weights[0]}, {"format": "pt"})


def index(names: Iterable[str]) -> bytes:
    shards = {f"model.layers.{number}.weight": name for number, name in enumerate(names)}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}).encode()


def archive(seed: int = 0, *, wide: bool = True) -> bytes:
    """Return what torch.save leaves; `wide` with the records for large archives that torch always writes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickle.dumps({"weight": seed}, protocol=2))
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", bytes([seed % 256]) * 512)
        file.writestr("archive/version", "3\n")
    return _widened(data.getvalue()) if wide else data.getvalue()


def _widened(data: bytes) -> bytes:
    body, end = data[:-22], data[-22:]
    entries, size, offset = struct.unpack("<HLL", end[10:20])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, entries, entries, size, offset)
    return body + record + struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body), 1) + end


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


def distributed_metadata(files: Mapping[str, bytes], pieces: int = 1500) -> bytes:
    """Return metadata of several frames, as torch pickles it: records of the pieces of each data file."""
    entries = {}
    for name, content in files.items():
        share, rest = divmod(len(content), pieces)
        for number in range(pieces):
            length = share + (rest if number == pieces - 1 else 0)
            entries[f"layers.{number}", name] = _StorageInfo(name, number * share, length)
    return pickle.dumps({"state_dict_metadata": {}, "storage_data": entries, "version": "1.0.0"}, protocol=4)


def numbered(count: int, stem: str = "model", suffix: str = "safetensors") -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


@dataclass(frozen=True)
class Sample:
    """A step of one layout.

    Args:
        name: What the sample shows.
        layout: The name that the step is published with.
        directory: The step's directory.
        parts: Its files in the order of their writing, all of which it needs: name and content.
        shards: The names of those that are counted.
        announced_by: What tells that its writer is done.
        extras: Files that join them when the step becomes a full checkpoint.
    """

    name: str
    layout: str
    directory: str
    parts: tuple[tuple[str, bytes], ...]
    shards: tuple[str, ...]
    payload: str
    announced_by: str = "marker"
    kind: str = "weights"
    extras: tuple[tuple[str, bytes], ...] = field(default=((".full_checkpoint", b""),))

    def place(self, root, names: Iterable[str] | None = None) -> str:
        """Write the step, or only the named files of it, and return its path."""
        path = f"{root}/{self.directory}"
        os.makedirs(path, exist_ok=True)
        for name, content in self.parts:
            if names is None or name in names:
                put(f"{path}/{name}", content)
        return path


def put(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def shards_below(place: str, count: int) -> tuple[tuple[str, bytes], ...]:
    return tuple((f"{place}{name}", tensors(seed)) for seed, name in enumerate(numbered(count)))


def ranks(place: str, world_size: int, part: str = "model") -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (f"{place}{part}_world_size_{world_size}_rank_{rank}.pt", archive(rank)) for rank in range(world_size)
    )


def _sample(name, layout, directory, parts, payload, **more) -> Sample:
    auxiliary = (".json", ".txt", ".metadata", "STABLE", "common.pt")
    shards = tuple(name for name, _ in parts if not name.endswith(auxiliary))
    return Sample(name, layout, directory, tuple(parts), more.pop("shards", shards), payload, **more)


_INDEX = "model.safetensors.index.json"
_DATA = {"__0_0.distcp": archive(1) + archive(2), "__1_0.distcp": archive(3)}
_ADAPTER = [("adapter_model.safetensors", tensors(1, "lora_A")), ("adapter_config.json", ADAPTER_CONFIG)]


def _below(place: str, parts: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(f"{place}{name}", content) for name, content in parts]


def _data(place: str) -> list[tuple[str, bytes]]:
    return [
        *_below(place, _DATA.items()),
        (f"{place}.metadata", distributed_metadata(_DATA)),
    ]


SAMPLES = (
    _sample(
        "trinity",
        "trinity-0.6",
        "global_step_8",
        [("actor/model.safetensors", tensors())],
        "global_step_8/actor",
    ),
    _sample(
        "trinity-sharded",
        "trinity-0.6",
        "global_step_8",
        [(f"actor/{_INDEX}", index(numbered(3))), *shards_below("actor/", 3)],
        "global_step_8/actor",
    ),
    _sample(
        "fsdp",
        "verl-fsdp",
        "global_step_20",
        ranks("actor/", 3),
        "global_step_20/actor",
        extras=ranks("actor/", 3, "optim") + ranks("actor/", 3, "extra_state"),
    ),
    _sample("fsdp-supervised", "verl-fsdp", "global_step_20", ranks("", 2), "global_step_20"),
    _sample(
        "megatron-1",
        "verl-megatron",
        "global_step_5",
        [
            ("actor/dist_ckpt/common.pt", archive(9)),
            *_data("actor/dist_ckpt/"),
            ("actor/dist_ckpt/metadata.json", b'{"sharded_backend": "torch_dist"}'),
        ],
        "global_step_5/actor/dist_ckpt",
    ),
    _sample(
        "megatron-2",
        "verl-megatron",
        "global_step_5",
        _data("actor/model/dist_ckpt/"),
        "global_step_5/actor/model/dist_ckpt",
        extras=(("actor/optimizer/dist_ckpt/.metadata", distributed_metadata(_DATA)),),
    ),
    _sample(
        "megatron-bridge",
        "verl-megatron",
        "global_step_5",
        [
            (f"actor/model/huggingface/{_INDEX}", index(numbered(2))),
            *shards_below("actor/model/huggingface/", 2),
        ],
        "global_step_5/actor/model/huggingface",
    ),
    _sample(
        "verl-export",
        "verl-huggingface",
        "global_step_5",
        shards_below("actor/huggingface/", 2),
        "global_step_5/actor/huggingface",
    ),
    _sample(
        "verl-lora",
        "verl-lora",
        "global_step_5",
        _below("actor/lora_adapter/", _ADAPTER),
        "global_step_5/actor/lora_adapter",
        kind="lora",
    ),
    _sample(
        "tinker",
        "tinker",
        "global_step_5",
        [("remote_sampler_path.txt", b"tinker://0123-ab/sampler_weights/job-sampler-5")],
        "tinker://0123-ab/sampler_weights/job-sampler-5",
        kind="remote",
        shards=("remote_sampler_path.txt",),
        extras=(
            (".full_checkpoint", b""),
            ("remote_checkpoint_path.txt", b"tinker://0123-ab/weights/job-state-5"),
        ),
    ),
    _sample(
        "prime",
        "prime-rl",
        "step_7",
        [("model.safetensors", tensors()), ("STABLE", b"")],
        "step_7",
        announced_by="itself",
        extras=(("trainer/.metadata", b""),),
    ),
    _sample(
        "prime-sharded",
        "prime-rl",
        "step_7",
        [*shards_below("", 2), (_INDEX, index(numbered(2))), ("STABLE", b"")],
        "step_7",
        announced_by="itself",
        extras=(("trainer/.metadata", b""),),
    ),
    _sample(
        "prime-checkpoint",
        "prime-rl",
        "step_7",
        [*shards_below("weight/", 2), ("STABLE", b"")],
        "step_7/weight",
        announced_by="itself",
        extras=(("trainer/.metadata", b""),),
    ),
    _sample(
        "prime-lora",
        "prime-rl",
        "step_7",
        [*_ADAPTER, ("STABLE", b"")],
        "step_7",
        announced_by="itself",
        kind="lora",
        extras=(("trainer/.metadata", b""),),
    ),
    _sample(
        "huggingface",
        "huggingface",
        "checkpoint-500",
        [("config.json", CONFIG), (_INDEX, index(numbered(3))), *shards_below("", 3)],
        "checkpoint-500",
        announced_by="time",
        extras=(("optimizer.pt", archive(5)),),
    ),
    _sample(
        "huggingface-bin",
        "huggingface",
        "checkpoint-500",
        [
            ("config.json", CONFIG),
            *((name, archive(seed)) for seed, name in enumerate(numbered(2, "pytorch_model", "bin"))),
        ],
        "checkpoint-500",
        announced_by="time",
        extras=(("optimizer.pt", archive(5)),),
    ),
    _sample(
        "huggingface-lora",
        "huggingface",
        "checkpoint-500",
        _ADAPTER,
        "checkpoint-500",
        announced_by="time",
        kind="lora",
        extras=(("optimizer.pt", archive(5)),),
    ),
)


def examine(disk: Disk, root: str, name: str) -> Step | None:
    """Return the state of one directory of a job, examined once and not cached."""
    step = step_of(name)
    return None if step is None else ForeignLayouts().examine(disk, root, name, step)
