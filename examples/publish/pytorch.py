"""Your own training loop, publishing its weights with the two lines that use `sync`.

    syncd watch JOB &
    python examples/publish/pytorch.py JOB --steps 20 --every 2

`set_model_state_dict` writes the tensors as safetensors, seals the step and announces it; the daemon checks it and
publishes the version that explorers follow. It returns when the step is durable. If that takes too long, or if the
model is sharded over ranks, use `syncd.transports.files.step_saver.StepSaver`: it writes in the background of
training, each rank its share (examples/publish/callback.py).
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy

from syncd.synchronizer import Synchronizer

VOCABULARY = 16


def main() -> None:
    """Train a bigram model to count."""
    options = _options()
    torch.manual_seed(0)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)  # maps the last token to the logits of the next
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    with Synchronizer.open(options.job, "trainer") as sync:
        for step in range(1, options.steps + 1):
            tokens = torch.randint(VOCABULARY, (64,))
            loss = cross_entropy(model(tokens), (tokens + 1) % VOCABULARY)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % options.every == 0:
                sync.set_model_state_dict(model.state_dict(), step)
                print(f"step {step}: loss {loss.item():.3f}, published", flush=True)
            time.sleep(options.pause)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="the job directory; must exist")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="steps between two versions")
    parser.add_argument("--pause", type=float, default=0.1, help="extra seconds per step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
