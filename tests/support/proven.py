"""Versions of real models with the probe that their trainer would have computed."""

import os
from pathlib import Path

from safetensors.torch import save

from support.probe_contract import ROWS
from syncd.protocol.probe import Probe
from syncd.protocol.writer import StepWriter

SHARD = "actor/model-00001-of-00001.safetensors"


def answer(model, rows=ROWS):
    """Return the log-prob of each token after the first of each row, by a forward pass of transformers."""
    import torch

    found = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([row])
            values = model(tokens).logits[:, :-1].float().log_softmax(-1)
            found.append(tuple(values.gather(-1, tokens[:, 1:, None]).flatten().tolist()))
    return tuple(found)


def probe_of(model, dtype="float32", rows=ROWS):
    """Return the probe of a model that computes in a dtype and is published in it."""
    return Probe(tuple(map(tuple, rows)), answer(model, rows), dtype, dtype)


def write_version(job, step, model, probe, change=None, beside=None):
    """Write a model as an announced step with a probe; a tied head is left out, as the trainer leaves it out.

    Args:
        change: Changes the tensors by name before they are written.
        beside: A directory whose configuration and tokenizer are written beside the weights.
    """
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if change is not None:
        change(state)
    writer = StepWriter(job, step, 1, f"a{step}")
    writer.begin()
    shard = writer.write(SHARD, save(state), tensors=len(state))
    names = [name for name in sorted(os.listdir(beside)) if name.endswith(".json")] if beside else []
    files = [writer.write(f"actor/{name}", Path(beside, name).read_bytes()) for name in names]
    writer.receipt(1, [shard], files, probe=probe)
    writer.seal()
    writer.announce()
