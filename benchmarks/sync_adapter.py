"""An adapter against whole weights: bytes, and the time from the trainer's save to a copy on the reader's host.

    python benchmarks/sync_adapter.py [--gib 1] [--rank 16] [--rounds 5] [--json out/sync_adapter.json] [--dir DIR]
                                      [--stage DIR]

The model has the layers of Qwen2 0.5B, as many as make the size; the adapter has A and B of all linear layers but the
head. Both are bfloat16. Contestants take turns in one run; each round begins with the other one, and ratios are taken
within a round. One sync is: StepSaver saves, `syncd watch` publishes, and a receiver leases the version, copies it to
the stage and compares every byte with its digest. The digest of the base is computed once and shown by itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import report
import torch
from safetensors.torch import save_file

from syncd.client.client import Client
from syncd.protocol.adapter_base import AdapterBase, find_base
from syncd.protocol.layout import ADAPTER_CONFIG, Job
from syncd.transports.files.leased_directory import DirectoryOptions
from syncd.transports.files.receive import FilesReceiver
from syncd.transports.files.stage import HostStage
from syncd.transports.files.step_saver import StepSaver

Weights = dict[str, torch.Tensor]
Figures = dict[str, float]

HIDDEN, INNER, KEYS, VOCABULARY = 896, 4864, 128, 151936
EMBEDDING = 2 * VOCABULARY * HIDDEN
"""Bytes of the embedding in bf16; a model has layers beside it, on which adapters are."""

LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
"""Output and input width of the linear layers of one layer of Qwen2 0.5B."""

CONTESTANTS = ("whole weights", "adapter")
_LONG, _POLL = 300.0, 0.002


def main() -> None:
    """Run both contestants and print what they take."""
    report.run_with_stage("syncd-adapter-", _options(), _measure, _print)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the whole weights")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/sync_adapter.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--stage", default="/dev/shm", help="where the stage is")
    options = parser.parse_args()
    if options.gib * (1 << 30) <= EMBEDDING:
        least = EMBEDDING / (1 << 30)
        parser.error(
            f"--gib {options.gib:g} leaves no layer for an adapter: the embedding has {least:.2f} GiB"
        )
    return options


def make_model(gib: float) -> Weights:
    """Return bf16 weights of about a size: an embedding, and layers until the size is reached."""
    found = {"model.embed_tokens.weight": _noise(VOCABULARY, HIDDEN)}
    layer = 0
    while sum(tensor.nbytes for tensor in found.values()) < gib * (1 << 30):
        names = {f"model.layers.{layer}.{name}.weight": shape for name, shape in LINEAR.items()}
        found |= {name: _noise(*shape) for name, shape in names.items()}
        layer += 1
    return found


def make_adapter(model: Weights, rank: int) -> Weights:
    """Return A and B of each linear layer of a model, by peft's names."""
    found = {}
    for name, weight in model.items():
        if ".layers." in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"] = _noise(rank, weight.shape[1])
            found[f"{stem}.lora_B.weight"] = _noise(weight.shape[0], rank)
    return found


def _noise(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).bfloat16()


class Syncs:
    """Saves steps, and receives each as a follower with a stage does.

    Args:
        job: The job, which a daemon leads.
        stage: The directory of the stage.
        model: The whole weights.
        adapter: The adapter.
        base: The model that it belongs to.
    """

    def __init__(self, job: Job, stage: str, model: Weights, adapter: Weights, base: AdapterBase) -> None:
        self._step = 0
        self._weights = {"whole weights": model, "adapter": adapter}
        self._savers = {"whole weights": StepSaver(job, 0, 1), "adapter": StepSaver(job, 0, 1, base=base)}
        self._client = Client.open(job.root, "explorer", "reader")
        kinds = DirectoryOptions(frozenset({"weights", "lora"}))
        self._receiver = FilesReceiver(self._client, kinds, HostStage(stage, job.root, self._client.clock))

    def one(self, contestant: str) -> Figures:
        """Return the parts of one sync, in seconds, and its bytes."""
        self._step += 1
        weights, saver = self._weights[contestant], self._savers[contestant]
        next(iter(weights.values()))[0, 0] = self._step % 251
        files = {ADAPTER_CONFIG: b"{}"} if contestant == "adapter" else {}
        began = time.monotonic()
        saver.save(self._step, f"bench-{self._step}", weights.items(), files)
        gathered = time.monotonic()
        saver.wait()
        written = time.monotonic()
        version = self._published()
        seen = time.monotonic()
        found = self._receiver.receive(version, _LONG)
        staged = time.monotonic()
        assert found is not None
        assert found.verified
        size = sum(record.size for record in found.shards)
        return {
            "gather": gathered - began, "write": written - gathered, "visibility": seen - written,
            "stage": staged - seen, "total": staged - began, "bytes": size,
        }  # fmt: skip

    def close(self) -> None:
        """Give everything back."""
        with ExitStack() as closing_all:
            closing_all.callback(self._client.close)
            closing_all.callback(self._receiver.close)
            for saver in self._savers.values():
                closing_all.callback(saver.close)

    def _published(self) -> Any:
        end = time.monotonic() + _LONG
        while (version := self._client.latest_version()) is None or version.step != self._step:
            if time.monotonic() > end:
                raise TimeoutError("the daemon publishes nothing")
            time.sleep(_POLL)
        return version


def _measure(scratch: Path, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    model = make_model(options.gib)
    adapter = make_adapter(model, options.rank)
    (scratch / "base").mkdir()
    save_file(model, scratch / "base" / "model.safetensors", {"format": "pt"})
    (place := scratch / "job").mkdir()
    job = Job.at(place)
    with report.running_daemon(place, *report.KEEP_NEWEST):
        base, seconds = _timed(lambda: find_base(job, str(scratch / "base")))
        found: dict[str, list[Figures]] = {name: [] for name in CONTESTANTS}
        with closing(Syncs(job, stage, model, adapter, base)) as syncs:
            for number in range(options.rounds + 1):
                for name in CONTESTANTS if number % 2 else CONTESTANTS[::-1]:
                    figures = syncs.one(name)
                    if number:
                        found[name].append(figures)
    return {"machine": report.machine(scratch, torch=torch.__version__), "base": seconds, "syncs": found}


def _timed(work: Callable[[], AdapterBase]) -> tuple[AdapterBase, float]:
    began = time.monotonic()
    return work(), time.monotonic() - began


_COLUMNS = ("gather", "write", "visibility", "stage", "total")


def _print(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    print(f"digest of the base, once a start: {figures['base']:.3f} s; seconds, medians (least-most)")
    print(f"{'':<14}{'MiB':>9}" + "".join(f"{name:>11}" for name in _COLUMNS))
    syncs = figures["syncs"]
    for name, rounds in syncs.items():
        row = "".join(f"{statistics.median(one[column] for one in rounds):>11.3f}" for column in _COLUMNS)
        totals = [one["total"] for one in rounds]
        print(f"{name:<14}{rounds[0]['bytes'] / (1 << 20):>9.1f}{row} ({min(totals):.3f}-{max(totals):.3f})")
    whole, adapter = (syncs[name] for name in CONTESTANTS)
    for what in ("bytes", "total"):
        ratio = statistics.median(one[what] / other[what] for one, other in zip(whole, adapter, strict=True))
        print(f"{what}: {ratio:.1f} x less with an adapter")


if __name__ == "__main__":
    main()
