"""The encoding ulp1 beside XOR with zstd and coordinates: size, encoding and applying, on synthetic AdamW steps.

    python benchmarks/delta.py [--values 33554432] [--rates 1e-6 3e-6 1e-5] [--rounds 3] [--json FILE]
    python benchmarks/delta.py --job JOB [--steps 3 4 5] [--rounds 3] [--json FILE]

Weights are bfloat16 over float32 masters, tensors of several scales; optimizer states are as in a run that has
trained for long. One core; GB/s of the model's bytes by CPU time, the best of the rounds. Each result is compared
with the new weights. `ulp1` computes the digests before and after; `xor` is what slime and SkyRL ship (tiles of 8 MiB
here, digest after), `coo` are int32 positions and bfloat16 values (digest after); `full` hashes, and copies.

With `--job` the weights are those of a real training instead: each step of a job against the step before it, float32
rounded to bfloat16; the rows have the median over these pairs.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from syncd.protocol.delta import TILE
from syncd.protocol.layout import Job, parse_step_name
from syncd.protocol.lineage import read_chain
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import parse_header
from syncd.transports.delta import apply, encode
from syncd.transports.delta.chain import Chain

Words = Any
"""An array of 16-bit words."""

Row = dict[str, Any]

CHUNK = 1 << 23
_SCALES = (0.015, 0.03, 0.02, 0.02, 0.02, 0.012, 0.02, 0.025)
_BETA1, _BETA2, _DECAY = 0.9, 0.95, 0.01
_ZSTD = pa.Codec("zstd", compression_level=1)


class Codec(NamedTuple):
    """One way to store a tile.

    Args:
        encode: Returns what is stored for a tile, from the words before and after.
        size: Returns its bytes.
        apply: Turns the words before into those after, in place, and compares the digest.
    """

    encode: Callable[[Words, Words], Any]
    size: Callable[[Any], int]
    apply: Callable[[Words, Any], bool | None]


def main() -> None:
    """Measure each codec at each learning rate, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 25)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--job", type=Path, help="compare the steps of this job")
    parser.add_argument("--steps", type=int, nargs="+", help="only these; else all that are there")
    options = parser.parse_args()
    rows = measure_job(options) if options.job else measure_rates(options)
    print("| learning rate | changed | codec | ratio | encode GB/s | apply GB/s |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| {rate} | {changed:.2%} | {codec} | {ratio:.1f} | {encode:.2f} | {apply:.2f} |".format(**row))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)


def measure_rates(options: argparse.Namespace) -> list[Row]:
    """Return the figures of each codec at each learning rate."""
    return [
        {"rate": f"{rate:g}", **row}
        for rate in options.rates
        for row in measured(*trained(rate, options.values), options.rounds)
    ]


def measure_job(options: argparse.Namespace) -> list[Row]:
    """Return the figures of each codec over the pairs of neighbouring steps of a job: medians."""
    job, found = Job.at(options.job), list[list[Row]]()
    steps = options.steps or sorted(filter(None, map(parse_step_name, os.listdir(options.job))))
    if len(steps) < 2:
        raise SystemExit(f"{options.job} has no two steps to compare")
    for before, after in pairwise(steps):
        found.append(measured(words_of(job, before), words_of(job, after), options.rounds))
    changed = [rows[0]["changed"] for rows in found]
    print(f"{len(found)} pairs of steps, changed {min(changed):.2%} to {max(changed):.2%}")
    return [_middle(rows) for rows in zip(*found, strict=True)]


def _middle(rows: Sequence[Row]) -> Row:
    figures = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "codec"}
    return {"rate": "a job's", "codec": rows[0]["codec"], **figures}


def words_of(job: Job, step: int) -> Words:
    """Return the weights of a step, whole or delta, as bfloat16 words; float32 is rounded, others are left out."""
    chain = Chain(job, read_chain(job, step))
    return np.concatenate([part for record in chain.manifest.whole_shards for part in _words(chain, record)])


def _words(chain: Chain, record: FileRecord) -> Iterator[Words]:
    data = b"".join(bytes(tile) for _, tile in chain.tiles(record))
    header = parse_header(data, record.size, record.name)
    for tensor in header.tensors.values():
        content = data[header.data_offset + tensor.start : header.data_offset + tensor.end]
        if tensor.dtype == "F32":
            yield bfloat16(np.frombuffer(content, np.float32))
        elif tensor.dtype == "BF16":
            yield np.frombuffer(content, np.uint16)


def measured(old: Words, new: Words, rounds: int) -> list[Row]:
    """Return the figures of each codec."""
    share = float(np.mean(old != new))
    return [
        {"changed": share, "codec": name, **_figures(codec, old, new, rounds)}
        for name, codec in CODECS.items()
    ]


def trained(rate: float, values: int) -> tuple[Words, Words]:
    """Return the bfloat16 words of a model before and after one step of AdamW."""
    random = np.random.default_rng(1)
    begins = range(0, values, CHUNK)
    scales = (_SCALES[number % len(_SCALES)] for number in range(len(begins)))
    counts = (min(CHUNK, values - begin) for begin in begins)
    parts = [_step(random, rate, scale, count) for scale, count in zip(scales, counts, strict=True)]
    return np.concatenate([old for old, _ in parts]), np.concatenate([new for _, new in parts])


def _step(random: np.random.Generator, rate: float, scale: float, count: int) -> tuple[Words, Words]:
    def normal() -> Words:
        return random.standard_normal(count, np.float32)

    weights = normal() * np.float32(scale)
    weights *= np.repeat(np.exp(0.35 * random.standard_normal(-(-count // 2048), np.float32)), 2048)[:count]
    signal = np.float32(0.3) * normal()
    first = signal + normal() * np.float32(((1 - _BETA1) / (1 + _BETA1)) ** 0.5)
    second = (1 + signal * signal) * np.exp(np.float32(0.22) * normal())
    gradient = signal + normal()
    first = np.float32(_BETA1) * first + np.float32(1 - _BETA1) * gradient
    second = np.float32(_BETA2) * second + np.float32(1 - _BETA2) * gradient * gradient
    update = first / (np.sqrt(second) + np.float32(1e-8)) + np.float32(_DECAY) * weights
    return bfloat16(weights), bfloat16(weights - np.float32(rate) * update)


def bfloat16(values: Words) -> Words:
    """Return float32 values rounded to the nearest bfloat16, ties to even, as words."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _figures(codec: Codec, old: Words, new: Words, rounds: int) -> dict[str, float]:
    step = TILE // 2
    places = [slice(begin, begin + step) for begin in range(0, old.size, step)]
    seconds, stored = _best(rounds, lambda: [codec.encode(old[place], new[place]) for place in places])
    target = old.copy()

    def apply_all() -> None:
        for place, one in zip(places, stored, strict=True):
            codec.apply(target[place], one)

    took = min(_timed(apply_all, lambda: np.copyto(target, old)) for _ in range(rounds))
    if not np.array_equal(target, new):
        raise SystemExit("a codec made other weights")
    size = sum(map(codec.size, stored))
    return {
        "ratio": 2 * old.size / size,
        "encode": old.nbytes / seconds / 1e9,
        "apply": old.nbytes / took / 1e9,
    }


def _timed(run: Callable[[], Any], prepare: Callable[[], Any]) -> float:
    prepare()
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _best(rounds: int, run: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    found: list[Any] = []
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        found = run()
        seconds.append(time.process_time() - begin)
    return min(seconds), found


def _require(target: Words, digest: bytes) -> None:
    if xxhash.xxh3_128_digest(target.data) != digest:
        raise SystemExit("a codec made other weights")


def _encode_xor(old: Words, new: Words) -> tuple[bytes, bytes]:
    return _ZSTD.compress(old ^ new, asbytes=True), xxhash.xxh3_128_digest(new.data)


def _apply_xor(target: Words, stored: Sequence[bytes]) -> None:
    target ^= np.frombuffer(_ZSTD.decompress(stored[0], decompressed_size=target.nbytes), np.uint16)
    _require(target, stored[1])


def _encode_coo(old: Words, new: Words) -> tuple[Words, Words, bytes]:
    places = np.flatnonzero(old != new)
    return places.astype(np.int32), new[places], xxhash.xxh3_128_digest(new.data)


def _apply_coo(target: Words, stored: tuple[Words, Words, bytes]) -> None:
    target[stored[0]] = stored[1]
    _require(target, stored[2])


def _apply_full(target: Words, stored: tuple[Words, bytes]) -> None:
    np.copyto(target, stored[0])
    _require(target, stored[1])


CODECS = {
    "ulp1": Codec(encode, lambda one: len(one.to_bytes()), apply),
    "xor + zstd1": Codec(_encode_xor, lambda one: len(one[0]) + 16, _apply_xor),
    "coo": Codec(_encode_coo, lambda one: one[0].nbytes + one[1].nbytes + 16, _apply_coo),
    "full": Codec(
        lambda _, new: (new, xxhash.xxh3_128_digest(new.data)), lambda one: one[0].nbytes, _apply_full
    ),
}

if __name__ == "__main__":
    main()
