"""What the training state of a full checkpoint costs the trainer: blocked seconds, against a memcpy of its bytes.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 5] [--json out/checkpoint.json] [--dir DIR]

The state is that of AdamW: weights and two moments in float32. All contestants run in turn in one process; ratios are
taken within a round. As in benchmarks/save.py the process starts itself anew with the setting of libc that
`trainer train` gives its ranks (`--plain` leaves that out).
"""

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from save import TUNABLES

from syncd.transports.files.buffers import PinnedBuffer
from syncd.transports.host_memory import unlimited
from trainer.engines.state_copy import StateBuffer, write_files

Contestant = Callable[[], object]
TARGET = 1.2
WIDTH = 2048


def main() -> None:
    """Run all contestants and print what they cost."""
    options = _options()
    if not options.plain and TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": TUNABLES})
    with report.scratch_directory("syncd-checkpoint-", options.dir) as scratch:
        figures = _measure(scratch, options)
    for name, seconds in figures["seconds"].items():
        print(f"{name:<28} {report.spread(seconds, 3)} s")
    ratio = statistics.median(figures["blocked against memcpy"])
    report.print_targets([("blocked, memcpy = 1", f"{ratio:.2f} x", f"<= {TARGET}", ratio <= TARGET)], 28, 10)
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/checkpoint.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--plain", action="store_true", help="without the setting of libc")
    return parser.parse_args()


def _state(gib: float) -> dict[str, Any]:
    """Return the training state of layers of 4 M parameters, as engines give it."""
    layers = max(1, round(gib * (1 << 30) / (12 * WIDTH * WIDTH)))
    weights = {f"layers.{number}.weight": torch.rand(WIDTH, WIDTH) for number in range(layers)}
    moments = {
        number: {"step": torch.tensor(1.0), "exp_avg": one.clone(), "exp_avg_sq": one.clone()}
        for number, one in enumerate(weights.values())
    }
    return {"model.pt": weights, "optim.pt": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def _measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    state, arena = _state(options.gib), StateBuffer(unlimited())
    tensors = [*state["model.pt"].values(), *_moments(state)]
    size = sum(tensor.nbytes for tensor in tensors)
    target = PinnedBuffer(size)
    contestants: dict[str, Contestant] = {
        "memcpy": lambda: _memcpy(target, tensors),
        "blocked: copy of the state": lambda: arena.capture(state),
        "not kept: a clone": lambda: [tensor.clone() for tensor in tensors],
        "torch.save": lambda: _durable(state, scratch),
    }
    arena.prepare(state)
    names, seconds = list(contestants), {name: list[float]() for name in contestants}
    for turn in range(options.rounds + 1):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            start = time.perf_counter()
            contestants[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    blocked = [
        ours / plain
        for ours, plain in zip(seconds["blocked: copy of the state"], seconds["memcpy"], strict=True)
    ]
    arena.close()
    return {
        "machine": report.machine(scratch, torch=torch.__version__),
        "bytes": size,
        "seconds": seconds,
        "blocked against memcpy": blocked,
    }


def _moments(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for values in state["optim.pt"]["state"].values() for tensor in values.values()]


def _memcpy(target: PinnedBuffer, tensors: list[torch.Tensor]) -> None:
    end = 0
    for tensor in tensors:
        ctypes.memmove(target.bytes.data_ptr() + end, tensor.data_ptr(), tensor.nbytes)
        end += tensor.nbytes


def _durable(state: dict[str, Any], scratch: Path) -> None:
    for name in write_files(state, str(scratch)):
        with open(scratch / name, "rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
