"""Processor time of a training step beside the same arithmetic in plain torch: verl on a CPU, one rank, float32.

    python benchmarks/train_step.py [--rounds 10] [--json FILE]

GRPO on two batches of the arithmetic example's model. Both train on the same rows in turns, so that whatever else the
machine does meets both. Plain torch has the forward pass of padded rows, log-probs, ratios, the clipped loss,
backward, clipping of the gradient and AdamW, and nothing else: no checks, no figures, no sharding. Processor seconds
of one thread; the first two steps of each are not counted. Parts of it are timed in steps of their own.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch
import transformers
from verl.workers.engine.fsdp import transformer_impl

from syncd.experience.model import Experience
from syncd.jobfile.model import JobFile
from trainer import get_trainer_wrapper
from trainer.engines.files import FileEngine
from trainer.engines.verl import engine as engine_module
from trainer.engines.verl import losses, updates
from trainer.experience.batch import Batch
from trainer.experience.cursor import Origin

VOCABULARY = 15
MICRO = 64
CASES = {"638 tokens": (64, 6, 4, 14), "5178 tokens": (128, 20, 10, 30)}
"""Rows of a batch, tokens of a prompt, tokens of the shortest and the longest response."""

LR, CLIP = 1e-4, 0.2

PARTS: dict[str, tuple[Any, str]] = {
    "ours: rows and limits": (engine_module, "prepare_step"),
    "ours: advantages (verl's estimator in them)": (engine_module.VerlEngine, "_columns"),
    "ours: rows as verl takes them": (updates, "tensors"),
    "ours: how far the model is from explorers": (losses.PolicyLoss, "_measure"),
    "verl: splitting into micro-batches": (transformer_impl, "prepare_micro_batches"),
    "verl: log-probs of logits": (transformer_impl.FSDPEngineWithLMHead, "prepare_model_outputs"),
    "verl: the loss": (losses, "ppo_loss"),
    "verl and torch: the optimizer's step": (transformer_impl.FSDPEngine, "optimizer_step"),
    "torch: the model's forward pass": (transformers.LlamaForCausalLM, "forward"),
    "torch: backward": (torch.Tensor, "backward"),
}
"""Parts of the engine's step, and the function of each."""


def main() -> None:
    """Measure both ways on both batches, and print one line for each batch."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="steps that are counted")
    parser.add_argument("--json", type=Path, help="where the figures go, with machine and date")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as place:
        machine = report.machine(Path(place), torch=torch.__version__, load=os.getloadavg()[0])
        _write_model(Path(place) / "model")
        for name, shape in CASES.items():
            figures[name] = _measure(Path(place), shape, options)
            print(f"{name}: {_line(figures[name])}", flush=True)
    if options.json:
        report.keep(options.json, {"machine": machine, "cases": figures})


def _write_model(directory: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    of_config: Callable[..., transformers.PreTrainedModel] = transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(1)
    of_config(config, dtype=torch.float32).save_pretrained(directory)


def _measure(place: Path, shape: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    engine, plain = _engine(place, shape), PlainStep(place / "model")
    batches = [_batch(shape, number) for number in range(options.rounds + 2)]
    ours: list[float] = []
    theirs: list[float] = []
    for batch in batches:
        ours.append(_timed(partial(engine.train_step, batch)))
        theirs.append(_timed(partial(plain.step, batch)))
    parts = _parts(engine, batches[2:])
    engine.shutdown()
    medians = [statistics.median(values[2:]) for values in (ours, theirs)]
    return {
        "tokens": float(sum(len(one.tokens) for one in batches[-1].experiences)),
        "engine_seconds": medians[0],
        "plain_seconds": medians[1],
        "ratio": statistics.median(a / b for a, b in zip(ours[2:], theirs[2:], strict=True)),
        "parts": parts,
    }


def _line(figures: dict[str, Any]) -> str:
    parts = "".join(f"\n    {share:6.1%}  {name}" for name, share in figures["parts"].items())
    return (
        f"{figures['tokens']:.0f} tokens, engine {figures['engine_seconds'] * 1e3:.1f} ms, "
        f"plain torch {figures['plain_seconds'] * 1e3:.1f} ms, ratio {figures['ratio']:.2f}{parts}"
    )


def _timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _parts(engine: FileEngine, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the share of the step's processor time of each part; those of one line below another are in it."""
    spent = dict.fromkeys(["step", *PARTS], 0.0)
    with ExitStack() as timed:
        for name, (owner, function) in PARTS.items():
            timed.enter_context(
                mock.patch.object(owner, function, _adding(getattr(owner, function), spent, name))
            )
        for batch in batches:
            spent["step"] += _timed(partial(engine.train_step, batch))
    return {name: spent[name] / spent["step"] for name in PARTS}


def _adding(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """Return a function that adds what each call takes."""

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            spent[name] += time.process_time() - start

    return timed


class PlainStep:
    """The arithmetic of a step of GRPO, and nothing else.

    Args:
        model: The directory of the model.
    """

    def __init__(self, model: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)

    def step(self, batch: Batch) -> float:
        """Train on a batch; return the loss."""
        rows = batch.experiences
        advantages = _advantages(rows)
        count = sum(map(sum, (row.action_mask for row in rows)))
        total = 0.0
        for begin in range(0, len(rows), MICRO):
            part = rows[begin : begin + MICRO]
            loss = self._loss(part, advantages[begin : begin + MICRO]) / count
            torch.autograd.backward(loss)
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _loss(self, rows: Sequence[Experience], advantages: torch.Tensor) -> torch.Tensor:
        width = max(len(row.tokens) for row in rows)
        tokens, mask, old, learned = (torch.zeros(len(rows), width) for _ in range(4))
        for at, row in enumerate(rows):
            length, prompt = len(row.tokens), row.prompt_length
            tokens[at, :length] = torch.tensor(list(row.tokens), dtype=torch.float32)
            mask[at, :length] = 1
            old[at, prompt:length] = torch.tensor(list(row.logprobs))
            learned[at, prompt:length] = torch.tensor(list(row.action_mask), dtype=torch.float32)
        ids = tokens.long()
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - old[:, 1:]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(gain * learned[:, 1:]).sum()


def _advantages(rows: Sequence[Experience]) -> torch.Tensor:
    rewards = torch.tensor([row.reward for row in rows]).view(-1, 8)
    spread = rewards.std(1, keepdim=True) + 1e-6
    return ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1)


def _engine(place: Path, shape: Sequence[int]) -> FileEngine:
    job = place / f"job {shape[0]}"
    job.mkdir()
    document: dict[str, Any] = {
        "job": {"dir": str(job)},
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "engine": {"device": "cpu", "compute_dtype": "float32", "micro_batch_size": MICRO},
        "algorithm": {"old_logprobs": "rollout", "optimizer": {"lr": LR}},
        "data": {"groups": shape[0] // 8, "group_size": 8},
        "trainer": {"total_steps": 1000},
    }
    engine = get_trainer_wrapper(JobFile.model_validate(document))
    assert isinstance(engine, FileEngine)
    engine.prepare()
    return engine


def _batch(shape: Sequence[int], number: int) -> Batch:
    rows, prompt, shortest, longest = shape
    lengths = [shortest + row * 7 % (longest - shortest + 1) for row in range(rows)]
    found = [
        Experience(
            tokens=[3 + (7 * row + 3 * at + number) % 12 for at in range(prompt + length)],
            prompt_length=prompt, logprobs=[-2.5] * length, action_mask=[True] * length,
            reward=float((row + number) % 3 == 0), group=f"g{row // 8}", task="t", rollout=row,
            generation=1, step=number,
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    origins = tuple(Origin("e", row, 0) for row in range(rows))
    groups = tuple(row // 8 for row in range(rows))
    return Batch(tuple(found), groups, (1.0,) * rows, (0,) * rows, origins, ())


if __name__ == "__main__":
    main()
