"""What a copy in memory costs a save and spares a load: by turns in one process, with and without the copy.

    python benchmarks/copies.py [--gib 0.1,0.5] [--rounds 5] [--json out/copies.json] [--dir DIR] [--memory /dev/shm]

Each round saves the weights once to files alone and once to files and memory, and loads each of the two steps into
parameters that exist, every byte hashed: the first from its files as the save has left them, the second from memory.
One round before them does not count. Ratios are taken within a round. Absolute times belong to this machine.
"""

import argparse
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from save import weights_of

from syncd.parts.memory.send import MemoryCopies
from syncd.protocol.layout import ACTOR, Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.memory_copies import hold_copy
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version
from syncd.transports.base import WeightDirectory
from syncd.transports.files.fill_tensors import check_fit, load
from syncd.transports.files.memory_copy import MemoryCopy
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.torch_tensors import target_tensors

FILES, MEMORY = "files", "memory"
SAVE, LOAD = "save", "load"

Weights = dict[str, torch.Tensor]
Round = dict[str, dict[str, float]]


def main() -> None:
    """Run all rounds and print what they cost."""
    options = _options()
    sizes = {}
    for gib in options.gib.split(","):
        with report.scratch_directory("syncd-memory-", options.dir) as scratch:
            sizes[gib] = _measure(scratch, float(gib), options)
            machine = report.machine(scratch, torch=torch.__version__, load=os.getloadavg()[0])
        _print(gib, sizes[gib])
    report.keep(options.json, {"machine": machine, "sizes": sizes})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", default="0.1,0.5", help="sizes of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/copies.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory")
    return parser.parse_args()


def _measure(scratch: Path, gib: float, options: argparse.Namespace) -> dict[str, Any]:
    (scratch / "job").mkdir()
    weights, job = weights_of(gib), Job.at(scratch / "job")
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    memory = MemoryCopies(job, options.memory)
    if problem := memory.open():
        raise SystemExit(problem)
    saver = StepSaver(job, 0, 1, dtype=None)
    saver.prepare(weights.items())
    try:
        parts = job, saver, memory
        rounds = [_round(number, parts, weights, parameters) for number in range(options.rounds + 1)]
    finally:
        saver.close()
        memory.close()
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"bytes": size, "rounds": rounds[1:]}


def _round(
    number: int, parts: tuple[Job, StepSaver, MemoryCopies], weights: Weights, parameters: Weights
) -> Round:
    job, saver, memory = parts
    found: Round = {}
    for place, way in enumerate((FILES, MEMORY) if number % 2 else (MEMORY, FILES)):
        step, attempt = 2 * number + place + 1, uuid.uuid4().hex
        copy = _copy(memory, step, attempt, weights) if way == MEMORY else None
        saved = _timed(lambda: _save(saver, step, attempt, weights, copy))  # noqa: B023 - called at once
        found[way] = {SAVE: saved, LOAD: _loaded(job, memory, step, parameters, way)}
        shutil.rmtree(job.step(step))
    return found


def _copy(memory: MemoryCopies, step: int, attempt: str, weights: Weights) -> MemoryCopy:
    size = sum(tensor.nbytes for tensor in weights.values())
    if problem := memory.make_room(step, attempt, size):
        raise SystemExit(problem)
    return memory.copy(step, attempt, 1, _give_up)


def _give_up(reason: str) -> None:
    raise SystemExit(reason)


def _save(saver: StepSaver, step: int, attempt: str, weights: Weights, copy: MemoryCopy | None) -> None:
    saver.save(step, attempt, weights.items(), {}, copy)
    saver.wait()


def _loaded(job: Job, memory: MemoryCopies, step: int, parameters: Weights, way: str) -> float:
    manifest = read_manifest(job.disk, job.step(step))
    copy = hold_copy(memory.memory_directory, manifest) if way == MEMORY else None
    path = f"{copy.path if copy else job.step(step)}/{ACTOR}"
    records = [record._replace(name=record.name.removeprefix(f"{ACTOR}/")) for record in manifest.shards]
    try:
        return _timed(lambda: _fill(path, records, parameters))
    finally:
        if copy is not None:
            copy.close()


def _fill(path: str, records: list[FileRecord], parameters: Weights) -> None:
    target = WeightDirectory(Version(1, 1, "weights", "step", "xxh3_128:0"), path, tuple(records))
    place = target_tensors(parameters)
    load(target, place, check_fit(target, place))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _print(gib: str, figures: dict[str, Any]) -> None:
    for what in (SAVE, LOAD):
        values = {way: [one[way][what] for one in figures["rounds"]] for way in (FILES, MEMORY)}
        ratio = statistics.median(a / b for a, b in zip(values[FILES], values[MEMORY], strict=True))
        shown = "  ".join(f"{way} {report.spread(seconds, 3)} s" for way, seconds in values.items())
        print(f"{gib} GiB  {what}  {shown}  memory is {ratio:.2f} x as fast")


if __name__ == "__main__":
    main()
