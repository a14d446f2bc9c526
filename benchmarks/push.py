"""A version from this process's memory into a server on this host: as shared memory, over gloo, and from files.

    python benchmarks/push.py --hook vllm=http://127.0.0.1:8000 --model DIR [--rounds 5] [--json out/push.json]

The server was started from DIR and takes weights from memory (docs/large-models.md#into-a-server). Each round
begins with another contestant, and ratios are taken within a round. What counts is the time from the call until the
server works again: pausing it, loading the same tensors, resetting caches and resuming.

    ipc     shared memory into which they were received, as `explorer run` receives them
    copied  the same from other memory, copied into shared memory bucket by bucket
    gloo    a group over gloo on loopback
    files   the server reads DIR, which is in the page cache, after a check of the files
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report
import torch
from safetensors.torch import load_file

from explorer_hooks.finding import open_hook
from explorer_hooks.hook import Hook
from explorer_hooks.hooks.http_engine import HttpEngineHook
from explorer_hooks.parts.broadcast.received import allocate
from syncd.protocol.version import Version
from syncd.transports.base import WeightDirectory

IPC, COPIED, GLOO, FILES = "ipc", "copied", "gloo", "files"
_TIMEOUT, _ALIGNED = 600.0, 16

Contestants = Mapping[str, Callable[[], None]]


def main() -> None:
    """Run all rounds and print what they take."""
    options = _options()
    tensors = _tensors(options.model)
    mib = sum(tensor.nbytes for tensor in tensors.values()) >> 20
    found = _race(_contestants(options, tensors), options.rounds)
    print(f"{options.hook}: {mib} MiB in {len(tensors)} tensors, seconds, median (least-most)")
    for name, seconds in found.items():
        ratio = statistics.median(other / own for own, other in zip(seconds, found[GLOO], strict=True))
        print(f"{name:<6} {report.spread(seconds, 3):<24} {ratio:.2f} x of gloo's speed")
    where = report.machine(Path(options.model), load=round(os.getloadavg()[0], 1), torch=torch.__version__)
    print(where)
    if options.json:
        report.keep(options.json, {"mib": mib, "hook": options.hook, "seconds": found, "machine": where})


def _race(contestants: Contestants, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant; a round before the first does not count."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.monotonic()
            contestants[name]()
            if number:
                found[name].append(time.monotonic() - begin)
    return found


def _contestants(options: argparse.Namespace, tensors: Mapping[str, torch.Tensor]) -> Contestants:
    hooks = {way: open_hook(options.hook, settings={"push": way}, timeout=_TIMEOUT) for way in (IPC, GLOO)}
    return {
        IPC: _push_by(hooks[IPC], _received(tensors)),
        COPIED: _push_by(hooks[IPC], tensors),
        GLOO: _push_by(hooks[GLOO], tensors),
        FILES: _load_by(hooks[GLOO], options.model),
    }


def _received(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors as a receiver of a broadcast has them: in one piece of shared memory."""
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values()]
    parts = zip(tensors.items(), torch.split(allocate(sum(sizes)), sizes), strict=True)
    return {
        name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (name, tensor), part in parts
    }


def _push_by(hook: Hook, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    assert isinstance(hook, HttpEngineHook)
    return lambda: hook.load_tensors("1.1+benchmark", tensors)


def _load_by(hook: Hook, directory: str) -> Callable[[], None]:
    version = Version(1, 1, "weights", "global_step_1/actor", f"sha256:{'0' * 64}")
    target = WeightDirectory(version, os.path.abspath(directory))

    def load() -> None:
        hook.prepare(target)
        hook.load(target)
        hook.commit(target)

    return load


def _tensors(directory: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(file)
    return found


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hook", required=True, help="vllm=ADDRESS or sglang=ADDRESS")
    parser.add_argument("--model", required=True, help="the directory that the server was started from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="where the figures go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
