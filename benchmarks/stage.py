"""What a staged copy costs the first follower of a host, which makes it, and each further one, which hashes it again.

    python benchmarks/stage.py [--gib 1] [--rounds 5] [--stage /dev/shm] [--dir DIR] [--json out/stage.json]

Followers are opened in one process, one after the other, so no memory is shared with another one at work. The step is
in the page cache when it is copied. Absolute times belong to this machine.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import report

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.safetensors import encode_header
from syncd.protocol.version import Version
from syncd.protocol.writer import StepWriter
from syncd.transports.files.leased_directory import payload_of
from syncd.transports.files.stage import HostStage, StageSource

_SHARDS = 4
_PIECE = 4 << 20


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", default="/dev/shm", help="where the stage is")
    parser.add_argument("--dir", help="where the job is")
    parser.add_argument("--json", default="out/stage.json", help="where to write the figures")
    report.run_with_stage("syncd-stage-bench-", parser.parse_args(), _measure, _print)


def _measure(scratch: Path, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    source = _write_step(scratch, int(options.gib * (1 << 30)))
    rows: dict[str, list[float]] = {"first": [], "first cpu": [], "further": [], "further cpu": []}
    for _ in range(options.rounds):
        first, further = (HostStage(stage, f"{scratch}/job") for _ in range(2))
        for name, host in (("first", first), ("further", further)):
            wall, processor = time.perf_counter(), time.process_time()
            copy = host.provide(source)
            rows[name].append(time.perf_counter() - wall)
            rows[f"{name} cpu"].append(time.process_time() - processor)
            if host is further:
                copy.close()
            else:
                held = copy
        held.close()
        first.close()
    load = report.span([round(one, 1) for one in os.getloadavg()])
    return {**report.machine(scratch, load=load), "gib": options.gib, "seconds": rows}


def _write_step(scratch: Path, size: int) -> StageSource:
    (scratch / "job").mkdir()
    job, each = Job.at(scratch / "job"), size // _SHARDS // _PIECE * _PIECE
    writer = StepWriter(job, 1, 1, "bench")
    writer.begin()
    records = []
    for shard in range(1, _SHARDS + 1):
        header = encode_header([(f"w{shard}", "U8", (each,), each)])
        pieces = (os.urandom(_PIECE) for _ in range(each // _PIECE))
        name = f"actor/model-{shard:05d}-of-{_SHARDS:05d}.safetensors"
        records.append(
            writer.write(name, (part for group in ([header], pieces) for part in group), tensors=1)
        )
    writer.receipt(1, records)
    writer.seal()
    manifest = read_manifest(job.disk, job.step(1))
    version = Version(1, 1, "weights", "global_step_1/actor", manifest.digest)
    return StageSource(job.disk, version, f"{job.step(1)}/actor", payload_of(manifest).records)


def _print(figures: dict[str, Any]) -> None:
    for name, values in figures["seconds"].items():
        print(f"{name:<12} {report.spread(values, 3)} s")


if __name__ == "__main__":
    main()
