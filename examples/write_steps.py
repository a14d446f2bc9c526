"""One rank of a small trainer: writes its share of each step by the protocol, as real safetensors shards.

    python examples/write_steps.py JOB --rank 1 --world-size 2 --steps 20 --every 0.5 --mib 4

Ranks share nothing but the job directory: the rank that finds all receipts of an attempt seals and announces it.
"""

import argparse
import time

import numpy as np
from safetensors.numpy import save

from syncd.protocol.layout import Job
from syncd.protocol.writer import StepWriter


def main() -> None:
    """Write the steps."""
    options = _options()
    job = Job.at(options.job)
    tensors = weights(options.rank, options.mib)
    for step in range(1, options.steps + 1):
        tensors = {
            name: tensor + np.float32(0.001) for name, tensor in tensors.items()
        }  # in place of an optimizer step
        write(job, step, options.rank, options.world_size, tensors)
        time.sleep(options.every)


def weights(rank: int, mib: float) -> dict[str, np.ndarray]:
    """Return this rank's share of a model: four tensors that together have `mib` MiB."""
    rows = max(int(mib * (1 << 20) / 4 / 4 / 256), 1)
    random = np.random.default_rng(rank)
    return {f"layers.{rank}.{part}.weight": random.random((rows, 256), dtype=np.float32) for part in range(4)}


def write(job: Job, step: int, rank: int, world_size: int, tensors: dict[str, np.ndarray]) -> None:
    """Write one rank's share of a step; seal and announce the step if it was the last."""
    writer = StepWriter(job, step, world_size, attempt=f"demo-{step}")
    writer.begin()
    shard = writer.write(
        f"actor/model-{rank:05d}-of-{world_size:05d}.safetensors", save(tensors), tensors=len(tensors)
    )
    writer.receipt(rank, [shard])
    if writer.seal():
        writer.announce()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("--rank", type=int, default=1, help="from 1")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two steps")
    parser.add_argument("--mib", type=float, default=4.0, help="size of this rank's share")
    return parser.parse_args()


if __name__ == "__main__":
    main()
