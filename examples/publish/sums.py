"""Your own training loop on a real model: it learns sums, and vLLM answers better with each version.

    python examples/arithmetic/make.py base
    mkdir job; syncd watch job &
    python examples/publish/sums.py base/model job

The two lines with `sync` publish; everything else is a loop as anybody has one. docs/tutorial-vllm.md has the rest.
"""

import argparse
import random
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from syncd.synchronizer import Synchronizer
from trainer.probe import probe_model

ROWS = 128
OPERANDS = range(10, 40)


def main() -> None:
    """Train, and publish every few steps."""
    options = _options()
    torch.manual_seed(0)
    random.seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Synchronizer.open(options.job, "trainer") as sync:
        for step in range(1, options.steps + 1):
            loss = _loss(model, tokenizer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % options.every == 0:
                sync.publish(model.state_dict(), step, probe=probe_model(model, options.model))
                print(f"step {step}: loss {loss.item():.3f}, published", flush=True)
                time.sleep(options.pause)


def _loss(model: torch.nn.Module, tokenizer: AutoTokenizer) -> torch.Tensor:
    pairs = [(random.choice(OPERANDS), random.choice(OPERANDS)) for _ in range(ROWS)]
    texts = [f"{left}+{right}={left + right}{tokenizer.eos_token}" for left, right in pairs]
    tokens = tokenizer(texts, return_tensors="pt").input_ids
    labels = tokens.clone()
    labels[:, : len("10+10=")] = -100  # only the answer is learned
    return model(input_ids=tokens, labels=labels).loss


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("job", help="the job directory; must exist")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40, help="steps between two versions")
    parser.add_argument("--pause", type=float, default=1.0, help="extra seconds after each version")
    return parser.parse_args()


if __name__ == "__main__":
    main()
