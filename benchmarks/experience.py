"""How long batches of experiences take to make, to encode and to decode, on one core.

    python benchmarks/experience.py

It uses only what every release has, so that it runs on an older tree too and compares the two. Figures and the
machine are in tests/RECORD.md.
"""

import random
import statistics
import time
from collections.abc import Callable

from syncd.experience.model import Experience
from syncd.experience.table import decode_batch, encode_batch

ROUNDS = 15
SIZES = {"1024 rows of 64 + 64 tokens": (1024, 64, 64), "128 rows of 512 + 2048 tokens": (128, 512, 2048)}


def rollouts(rows: int, prompt: int, response: int) -> list[Experience]:
    """Return rollouts of one segment and one version."""
    draw = random.Random(1)
    tokens = [draw.randrange(1 << 17) for _ in range(prompt + response)]
    logprobs = [-draw.random() for _ in range(response)]
    return [
        Experience(
            tokens=tokens, prompt_length=prompt, logprobs=logprobs, action_mask=[True] * response, reward=1.0,
            group=f"group-{row // 8}", task=f"task-{row // 8}", rollout=row % 8, generation=1, step=40,
            info={"prompt": "what is asked", "response": "what is answered"},
        )
        for row in range(rows)
    ]  # fmt: skip


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the least time of the processor over several rounds."""
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) * 1000)
    return statistics.median(taken), min(taken)


def main() -> None:
    """Print a line for each size and each piece of work."""
    for name, size in SIZES.items():
        made = rollouts(*size)
        data = encode_batch(made)
        print(f"{name}: {len(data)} bytes")
        for what, work in (
            ("make", lambda size=size: rollouts(*size)),
            ("encode", lambda made=made: encode_batch(made)),
            ("decode", lambda data=data: decode_batch(data, "benchmark")),
        ):
            median, least = milliseconds(work)
            print(f"  {what}: median {median:.1f} ms, least {least:.1f} ms")


if __name__ == "__main__":
    main()
