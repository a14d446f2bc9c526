"""From the trainer's save to the explorers' parameters updated, in parts, against the way it is done today.

    python benchmarks/sync.py [--gib 0.25] [--rounds 5] [--readers 1,4,8] [--json out/sync.json] [--dir DIR]
                              [--reader-dir DIR] [--stage DIR] [--ways "syncd, early" ...]

The trainer is this process; readers are processes of their own with parameters of their own, in which a thread
generates in pieces of 10 ms. Contestants take turns in one run; each round begins with another one, and ratios are
taken within a round. All of a sync counts, until the last reader runs the new weights:

    syncd, early     as the next one, with stages that copy what is still being written
    syncd, stage     StepSaver in the background, `syncd watch`, followers that share a stage
    syncd            the same, each reader from the mount, through the page cache
    save_file        one safetensors file, a marker that readers poll each second, load_file and copy_
    torch.save       the same with torch.save and torch.load

Today's ways write, fsync (as closing a file does on a network mount) and rename; their file is dropped from the page
cache before the marker is written, and that does not count: on a cluster readers are other hosts. With --reader-dir
readers go by another path to the same directory: a second NFS client's.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import report
import safetensors.torch
import torch
from sync_reader import MARKER, PARTS, parameters_like, read_forever

from syncd.protocol.layout import Job
from syncd.protocol.mount import mount_of
from syncd.synchronizer import Synchronizer
from syncd.transports.files.step_saver import StepSaver

Weights = dict[str, torch.Tensor]
Figures = dict[str, float]
OURS = ("syncd, early", "syncd, stage", "syncd")
THEIRS = ("save_file", "torch.save")
_LONG = 300.0


def main() -> None:
    """Run all contestants and print what they take."""
    torch.set_num_threads(1)
    report.run_with_stage("syncd-sync-", _options(), _measure, _print)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.25, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--readers", type=_counts, default=(1, 4, 8), help="numbers of readers: 1,4,8")
    parser.add_argument("--json", default="out/sync.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--reader-dir", default=None, help="the same directory as readers see it")
    parser.add_argument("--stage", default="/dev/shm", help="where the stage is")
    parser.add_argument("--ways", nargs="+", default=(*OURS, *THEIRS), help="the ways that are measured")
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def make_weights(gib: float) -> Weights:
    """Return bf16 weights in tensors of at most 16 MiB."""
    total, largest = max(int(gib * (1 << 29)), 1024), 1 << 23
    sizes = [largest] * (total // largest) + [total % largest]
    noise = torch.randn(min(total, largest)).bfloat16()
    return {f"p{number}": noise[:size].clone() for number, size in enumerate(sizes) if size}


class Trainer:
    """What saves, in each of the ways.

    Args:
        place: The directory of this run, as the trainer sees it.
        weights: What is saved; one element is the number of the save, so that readers can be checked.
    """

    def __init__(self, place: Path, weights: Weights) -> None:
        self._place, self._weights, self.step = place, weights, 0
        self._saver = StepSaver(Job.at(place / "job"), 0, 1)
        self._ways: dict[str, Callable[[Path], None]] = {
            "save_file": lambda path: safetensors.torch.save_file(weights, path),
            "torch.save": lambda path: torch.save(weights, path),
        }

    def save(self, contestant: str) -> Figures:
        """Save; return when it began, was free again, and was announced."""
        self.step += 1
        self._weights["p0"][0] = self.step % 251
        return self._ours(contestant) if contestant in OURS else self._today(contestant)

    def close(self) -> None:
        """Give threads and memory back."""
        self._saver.close()

    def _ours(self, contestant: str) -> Figures:
        began = time.monotonic()
        self._saver.leaves_notes = (
            contestant == "syncd, early"
        )  # a trainer leaves them where an explorer reads them
        self._saver.save(self.step, f"bench-{self.step}", self._weights.items())
        gathered = time.monotonic()
        self._saver.wait()
        return {"began": began, "gathered": gathered, "announced": time.monotonic(), "left_out": 0.0}

    def _today(self, contestant: str) -> Figures:
        began = time.monotonic()
        path, temporary = self._place / contestant, self._place / f".{contestant}"
        self._ways[contestant](temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        written = time.monotonic()
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = time.monotonic()
        (self._place / f".{MARKER}").write_text(str(self.step))
        (self._place / f".{MARKER}").replace(self._place / MARKER)
        return {
            "began": began, "gathered": began, "announced": time.monotonic(), "left_out": dropped - written
        }  # fmt: skip


@contextmanager
def _daemon(job: Path) -> Iterator[None]:
    job.mkdir()
    with report.running_daemon(job, *report.KEEP_NEWEST), Synchronizer.open(job, "trainer"):
        yield


@contextmanager
def _readers(place: Path, stage: str, weights: Weights, count: int) -> Iterator[list[Connection]]:
    # Forked before there is any thread: each has what is imported here, and parameters of its own.
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(count):
        here, there = context.Pipe()
        shapes = parameters_like(weights)
        processes.append(
            context.Process(target=read_forever, args=(there, str(place), stage, number, shapes), daemon=True)
        )
        processes[-1].start()
        pipes.append(here)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(30)
            process.kill()


def _measure(scratch: Path, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    weights = make_weights(options.gib)
    place = Path(options.reader_dir) / scratch.name if options.reader_dir else scratch
    contestants = tuple(options.ways)
    found: dict[str, Any] = {str(count): {name: [] for name in contestants} for count in options.readers}
    loads = []
    with (
        _daemon(scratch / "job"),
        _readers(place, stage, weights, max(options.readers)) as pipes,
        closing(Trainer(scratch, weights)) as trainer,
    ):
        for number in range(options.rounds + 1):
            turn = number % len(contestants)
            for count in options.readers:
                for name in contestants[turn:] + contestants[:turn]:
                    figures = _one(trainer, pipes[:count], name)
                    if number:
                        found[str(count)][name].append(figures)
            loads.append(round(os.getloadavg()[0], 1))
    size = sum(tensor.nbytes for tensor in weights.values())
    machine = report.machine(
        scratch, torch=torch.__version__, stage=mount_of(stage).type, load=report.span(loads)
    )
    return {"machine": machine, "bytes": size, "tensors": len(weights), "readers": found}


def _one(trainer: Trainer, pipes: list[Connection], contestant: str) -> Figures:
    """Return the parts of one sync: those of the reader that was last."""
    for pipe in pipes:
        pipe.send(contestant)
    for pipe in pipes:
        _answer(pipe)  # it is waiting for the new weights now
    saved = trainer.save(contestant)
    reports = [_answer(pipe) for pipe in pipes]
    assert all(report["weights"] == trainer.step % 251 for report in reports), "a reader runs something else"
    last = max(reports, key=lambda report: report["ended"])
    parts = {
        "gather": saved["gathered"] - saved["began"],
        "write": saved["announced"] - saved["gathered"] - saved["left_out"],
        **{part: last.get(part, 0.0) for part in PARTS},
    }
    total = last["ended"] - saved["began"] - saved["left_out"]
    # What the reader has not measured itself is what lies between the marker and its first look at the step.
    return {**parts, "visibility": max(total - sum(parts.values()), 0.0), "total": total}


def _answer(pipe: Connection) -> Figures:
    if not pipe.poll(_LONG):
        raise TimeoutError("a reader says nothing")
    answer: Figures | str = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)  # noqa: TRY004 - what a reader died of
    return answer


_COLUMNS = ("gather", "write", "visibility", "stage", "verify", "pause", "load", "confirm", "total")


def _print(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    print(f"{figures['bytes'] / (1 << 30):.3f} GiB in {figures['tensors']} tensors; seconds, medians")
    for count, found in figures["readers"].items():
        print(f"\n{f'{count} readers':<14}" + "".join(f"{name:>11}" for name in _COLUMNS))
        for name, rounds in found.items():
            row = [statistics.median(one[column] for one in rounds) for column in _COLUMNS]
            totals = [one["total"] for one in rounds]
            print(
                f"{name:<14}" + "".join(f"{value:>11.3f}" for value in row),
                f" ({min(totals):.2f}-{max(totals):.2f})",
            )
        for ours in (name for name in OURS if name in found):
            ratios = {theirs: _ratio(found[theirs], found[ours]) for theirs in THEIRS if theirs in found}
            than = [f"{ratio:.1f} x as fast as {name}" for name, ratio in ratios.items()]
            # Against a write that nobody reads meanwhile, if that is measured.
            durable = _over_write(found[ours], found.get("syncd", found.get("syncd, stage", found[ours])))
            print(f"{ours}: " + ", ".join([*than, f"{durable:.2f} x a durable write"]))


def _over_write(syncs: list[Figures], writes: list[Figures]) -> float:
    return statistics.median(
        sync["total"] / (write["gather"] + write["write"]) for sync, write in zip(syncs, writes, strict=True)
    )


def _ratio(above: list[Figures], below: list[Figures]) -> float:
    return statistics.median(one["total"] / other["total"] for one, other in zip(above, below, strict=True))


if __name__ == "__main__":
    main()
