"""What tests of engines share: a job's configuration, small models, and batches with everything ragged."""

import json
import os
import random
from dataclasses import replace
from itertools import pairwise

from syncd.experience.model import Experience
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from trainer.experience.batch import Batch
from trainer.experience.cursor import Origin
from trainer.experience.sft import Example

VOCAB = 61


def configured(path, job_dir="/nowhere", /, **tables):
    """Return a configuration in float32 on processors; tables as the file has them, `algorithm={...}`."""
    optimizer = {"lr": 1e-2, "clip_grad": 1e6} | tables.get("algorithm", {}).get("optimizer", {})
    base = {
        "job": {"dir": str(job_dir), "seed": 7},
        "model": {"path": str(path)},
        "engine": {"device": "cpu", "compute_dtype": "float32", "micro_batch_size": 8},
        "algorithm": {},
        "data": {"groups": 3, "group_size": 4},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    base["algorithm"] = base["algorithm"] | {"optimizer": optimizer}
    return JobFile.model_validate(base)


def context_of(config, ranks, device="cpu"):
    """Return what an engine is made of."""
    import torch

    from trainer.engines.base import EngineContext

    return EngineContext(config, Job.at(config.job.dir), ranks, torch.device(device))


def batch_of(seed, sizes=(4, 3, 3), examples=0, weight=1.0, reward=None):
    """Return a batch: groups of these sizes, equal rewards in the last one, a tool's tokens in every third row."""
    draw = random.Random(seed)
    found, groups = [], []
    for group, size in enumerate(sizes):
        for member in range(size):
            flat = 0.5 if group == len(sizes) - 1 else None
            found.append(_experience(draw, group, member, flat if reward is None else reward))
            groups.append(group)
    count = len(found)
    weights = tuple(weight if number % 2 else 1.0 for number in range(count))
    origins = tuple(Origin("e", number, 0) for number in range(count))
    return Batch(tuple(found), tuple(groups), weights, (0,) * count, origins, _examples(draw, examples))


def segmented_batch(seed):
    """Return a batch of two groups: rollouts of one, two and three segments; some tokens are unproven."""
    draw = random.Random(seed)
    found, groups = [], []
    for group in range(2):
        for member, segments in enumerate((1, 3, 2)):
            reward = draw.random()
            for segment in range(segments):
                row = _experience(draw, group, member, reward)
                unproven = [draw.random() < 0.3 for _ in row.logprobs] if segment else None
                found.append(replace(row, segment=segment, segments=segments, unproven=unproven))
                groups.append(group)
    weights = tuple(0.5 if one.rollout == 1 else 1.0 for one in found)
    origins = tuple(Origin("e", 1, number) for number in range(len(found)))
    return Batch(tuple(found), tuple(groups), weights, (0,) * len(found), origins)


def cut(batch, most):
    """Return a batch with each rollout cut into up to `most` segments, whose prompts are all tokens before them."""
    found, kept = [], []
    for number, row in enumerate(batch.experiences):
        length, start = len(row.logprobs), row.prompt_length
        ends = sorted({length * part // most for part in range(1, most + 1)} - {0})
        for segment, (first, end) in enumerate(pairwise([0, *ends])):
            kept.append(number)
            found.append(replace(
                row, tokens=list(row.tokens)[: start + end], prompt_length=start + first,
                logprobs=row.logprobs[first:end], action_mask=row.action_mask[first:end], spans=(),
                segment=segment, segments=len(ends),
            ))  # fmt: skip
    of_rows = (
        tuple(values[number] for number in kept) for values in (batch.groups, batch.weights, batch.ages)
    )
    origins = tuple(Origin("e", 1, number) for number in range(len(found)))
    return Batch(tuple(found), *of_rows, origins)


def row_of(mask, *, reward, group, rollout, segment=0, segments=1, turns=None):
    """Return a segment of these response tokens, of which the model chose those of the mask."""
    return Experience(
        tokens=range(1, len(mask) + 2), prompt_length=1, logprobs=[-1.0] * len(mask), action_mask=map(bool, mask),
        reward=reward, group=group, task="t", rollout=rollout, segment=segment, segments=segments,
        turn_rewards=turns, generation=1, step=0,
    )  # fmt: skip


def batch_of_rows(rows):
    """Return a batch of one group."""
    origins = tuple(Origin("e", 1, number) for number in range(len(rows)))
    return Batch(tuple(rows), (0,) * len(rows), (1.0,) * len(rows), (0,) * len(rows), origins)


def taught(batch, every=1):
    """Return a batch of which a teacher has read every so many rows; its log-probs are drawn."""
    draw = random.Random(9)
    rows = tuple(
        replace(row, teacher_logprobs=[-4 * draw.random() for _ in row.logprobs]) if at % every == 0 else row
        for at, row in enumerate(batch.experiences)
    )
    return replace(batch, experiences=rows)


def _experience(draw, group, member, reward):
    prompt, response = draw.randint(1, 5), draw.randint(2, 9)
    mask = [True] * response
    if member % 3 == 2:
        mask[0] = mask[-1] = False
    return Experience(
        tokens=[draw.randrange(VOCAB) for _ in range(prompt + response)], prompt_length=prompt,
        logprobs=[-4 + draw.random() for _ in range(response)], action_mask=mask,
        reward=draw.random() if reward is None else reward, group=f"g{group}", task="t", rollout=member,
        generation=1, step=0,
    )  # fmt: skip


def _examples(draw, count):
    lengths = [(draw.randint(1, 4), draw.randint(1, 6)) for _ in range(count)]
    return tuple(
        Example([draw.randrange(VOCAB) for _ in range(prompt + response)], prompt)
        for prompt, response in lengths
    )


def make_model(path, *, tied, binary=False, tokenizer=False, dropout=0.0, vocab=VOCAB):
    """Make a model directory of a few thousand parameters, the same each time; training with dropout draws."""
    import torch
    import transformers

    torch.manual_seed(3)
    kind = "Qwen2" if tied else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64,
        attention_dropout=dropout,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(path)
    if binary:
        os.remove(f"{path}/model.safetensors")
        torch.save(model.state_dict(), f"{path}/pytorch_model.bin")
    if tokenizer:
        make_tokenizer(path)
    return str(path)


def change_weights(path, change):
    """Change the weights of a model directory, a table of tensors by name."""
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{path}/model.safetensors")
    change(weights)
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})


def remove_a_tensor(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def reshape_a_tensor(weights):
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()


def make_tokenizer(path):
    words = {f"w{number}": number for number in range(VOCAB)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model,
    }  # fmt: skip
    with open(f"{path}/tokenizer.json", "w", encoding="utf-8") as file:
        json.dump(document, file)
    with open(f"{path}/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}, file)
