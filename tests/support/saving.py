"""What the tests of saving share: small models, a job, and a look at what a save has left."""

import importlib
import json
import os

import torch
from safetensors.torch import load_file

from syncd.protocol.disk import list_if_there
from syncd.protocol.layout import Job, parse_attempt_name
from syncd.protocol.manifest import damaged_files, missing_files, read_manifest
from syncd.protocol.safetensors import read_header
from syncd.protocol.version import read_marker

KINDS_OF_SAVE = [
    (mode, dtype) for mode in ("background", "stream") for dtype in (torch.bfloat16, torch.float32)
]
"""Mode and dtype of each step that programs/fsdp_save.py writes."""


def new_job(path) -> Job:
    """Return a job in a new directory."""
    os.makedirs(path, exist_ok=True)
    return Job.at(path)


def tiny(tie=False, kind="qwen2"):
    """Return a random causal model of a few thousand parameters, the same each time."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(3)
    config = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tie,
    }  # fmt: skip
    classes = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    make_config, make_model = classes[kind]
    return make_model(make_config(**config)).eval()


def config_of(model) -> dict[str, bytes]:
    """Return the files that make a directory of weights loadable."""
    return {"config.json": model.config.to_json_string(use_diff=False).encode()}


def log_probs(model) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % 61
    with torch.no_grad():
        return torch.log_softmax(model(tokens).logits.float(), -1)


def whole(job: Job, step: int):
    """Return the manifest of a step after checking every byte of it, and that it is announced."""
    manifest = read_manifest(job.disk, job.step(step))
    assert not missing_files(job.disk, job.step(step), manifest)
    assert not damaged_files(job.disk, job.step(step), manifest)
    assert read_marker(job.disk, job.marker).step == step
    return manifest


def load(job: Job, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step as the safetensors library reads them, each file checked."""
    found: dict[str, torch.Tensor] = {}
    for record in read_manifest(job.disk, job.step(step)).shards:
        path = f"{job.step(step)}/{record.name}"
        header = read_header(job.disk, path)
        assert header.data_offset % 4096 == 0
        assert len(header.tensors) == record.tensors
        part = load_file(path)
        assert not part.keys() & found.keys()
        found |= part
    return found


def index_of(job: Job, step: int) -> dict:
    with open(f"{job.step(step)}/actor/model.safetensors.index.json", encoding="utf-8") as file:
        return json.load(file)


def absent(job: Job, step: int) -> bool:
    """Say whether a save left no step: neither a manifest nor a marker naming it."""
    marker = read_marker(job.disk, job.marker).step
    return not os.path.exists(f"{job.step(step)}/manifest.json") and marker != step


def temporaries(job: Job, step: int) -> list[str]:
    names = [entry.name for entry in job.disk.list(job.root)]
    attempts = [name for name in names if parse_attempt_name(name) == step]
    entries = [entry for name in attempts for entry in list_if_there(job.disk, f"{job.root}/{name}/actor")]
    return [entry.name for entry in entries if entry.name.endswith(".tmp")]
