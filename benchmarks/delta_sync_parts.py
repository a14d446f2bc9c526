"""The processes of delta_sync.py: a trainer that stores steps, and readers that fetch them, one after the other.

    python benchmarks/delta_sync_parts.py train DIR WAYS MIB_OR_FILE
    python benchmarks/delta_sync_parts.py read DIR WAYS STAGE

A line of standard input is `WAY STEP FORM`. The trainer answers with the form, the time at which the step was durable
and its bytes; a reader with the times at which it saw the step and had it, and the processor's seconds between.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from delta import CODECS, Words, trained

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from syncd.protocol.delta import TILE  # noqa: E402
from syncd.protocol.layout import Job  # noqa: E402

ANSWER = "answer:"

WAYS: dict[str, Any] = {"copy": "", "full": "off", "delta": "on", "auto": "auto", "xor": "", "coo": ""}
"""What is compared, and `sync.delta` of its job; none for what is a plain file."""

_CODECS = {"xor": CODECS["xor + zstd1"], "coo": CODECS["coo"]}
_RATE = 1e-6
_PIECE = 1 << 20
_LONG = 300.0
_WORDS = TILE // 2
_LENGTH = 4


def main() -> None:
    """Do what is asked on standard input until it ends."""
    role, place, ways, more = sys.argv[1:]
    work = {"train": _trainer, "read": _reader}[role](place, ways.split(","), more)
    _answer("ready")
    for line in sys.stdin:
        way, step, form = line.split()
        _answer(*work(way, int(step), form))
    os._exit(0)


def _answer(*words: object) -> None:
    print(ANSWER, *words, flush=True)


Work = Callable[[str, int, str], Sequence[object]]


def _trainer(place: str, ways: Sequence[str], weights_of: str) -> Work:
    """Return what changes the weights, and stores them in one of the ways.

    Args:
        place: The directory of the jobs.
        ways: What is compared.
        weights_of: MiB of weights, or a file with those before and after a step, as `delta.trained` returns them.
    """
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    is_size = weights_of.isdecimal()
    one, other = trained(_RATE, int(weights_of) << 19) if is_size else np.load(weights_of)
    words, before = one.copy(), other
    flat = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    weights = {f"p{number}": part for number, part in enumerate(torch.split(flat, 1 << 22))}
    send = {way: _sender(place, way, weights) for way in filter(WAYS.get, ways)}

    def work(way: str, step: int, form: str) -> Sequence[object]:
        nonlocal before
        if way == "train":
            before, after = (one, other) if before is other else (other, one)
            words[:] = after
            return (way,)
        if way in send:
            return send[way](step)
        is_whole = way not in _CODECS or form == "whole"
        data = [words.view("u1").data] if is_whole else _encoded(way, before, words)
        return "file", *_written(Path(place, way, str(step)), data)

    return work


def _sender(place: str, way: str, weights: dict[str, Any]) -> Callable[[int], Sequence[object]]:
    from support.delta_saves import form_of  # noqa: PLC0415

    from syncd.client.client import Client  # noqa: PLC0415
    from syncd.jobfile.sections import SyncSection  # noqa: PLC0415
    from syncd.protocol.manifest import read_manifest  # noqa: PLC0415
    from syncd.transports.base import SendContext, StepContent  # noqa: PLC0415
    from syncd.transports.files.send import FilesSender  # noqa: PLC0415
    from syncd.transports.host_memory import unlimited  # noqa: PLC0415
    from syncd.transports.ranks import Ranks  # noqa: PLC0415

    job = Job.at(f"{place}/{way}")
    settings = SyncSection(delta=WAYS[way], keyframe_every=1000, max_chain_bytes=1 << 40)
    client = Client.open(job.root, "trainer")
    sender = FilesSender.open(SendContext(job, Ranks(), settings, client, memory=unlimited()))

    def send(step: int) -> Sequence[object]:
        sender.send(step, uuid.uuid4().hex, StepContent(weights.items, {"config.json": b"{}"}))
        sender.wait()
        stored = time.monotonic()
        return form_of(job, step), stored, read_manifest(job.disk, job.step(step)).size

    return send


def _encoded(way: str, before: Words, after: Words) -> list[memoryview]:
    """Return the changes of each tile: the parts that the codec stores, each after its length."""
    pieces = list[memoryview]()
    for begin in range(0, after.size, _WORDS):
        place = slice(begin, begin + _WORDS)
        for part in _CODECS[way].encode(before[place], after[place]):
            data = memoryview(part).cast("B")
            pieces += [memoryview(data.nbytes.to_bytes(_LENGTH, "little")), data]
    return pieces


def _written(path: Path, pieces: Sequence[memoryview]) -> tuple[float, int]:
    """Write and sync a file in place of the earlier ones; return when it was durable, and its bytes."""
    for old in path.parent.iterdir():
        old.unlink()
    with path.open("xb", buffering=_PIECE) as file:
        for piece in pieces:
            for begin in range(0, len(piece), _PIECE):
                file.write(piece[begin : begin + _PIECE])
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic(), path.stat().st_size


def _reader(place: str, ways: Sequence[str], stage: str) -> Work:
    """Return what fetches a step in one of the ways."""
    os.makedirs(stage)
    fetch = {way: _fetcher(place, way, stage) for way in filter(WAYS.get, ways)}

    def work(way: str, step: int, form: str) -> Sequence[object]:
        if way in fetch:
            return fetch[way](step)
        source, target = Path(place, way, str(step)), Path(stage, f"{way}.copy")
        began, processor = time.monotonic(), time.process_time()
        if way not in _CODECS or form == "whole":
            _copy(source, target)
        else:
            _apply(way, source, target)
        ended = time.monotonic(), time.process_time()
        if way not in _CODECS:
            target.unlink()
        return began, ended[0], ended[1] - processor

    return work


def _fetcher(place: str, way: str, stage: str) -> Callable[[int], Sequence[object]]:
    from support.fake_hook import FakeEngine, FakeHook  # noqa: PLC0415

    from explorer_hooks.follower.policy import FollowOptions  # noqa: PLC0415
    from explorer_hooks.follower.versions import Fetcher  # noqa: PLC0415
    from syncd.client.client import Client  # noqa: PLC0415
    from syncd.protocol.local_disk import SystemClock  # noqa: PLC0415
    from syncd.transports.files.leased_directory import LoadTimings  # noqa: PLC0415

    client = Client.open(f"{place}/{way}", "explorer", Path(stage).name)
    options = FollowOptions(stage=f"{stage}/{way}")
    os.makedirs(options.stage or "")
    fetcher = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, lambda *_, **__: None)

    def fetch(step: int) -> Sequence[object]:
        version: Any = client.wait_for(partial(_published, client, step), _LONG)
        seen, processor = time.monotonic(), time.process_time()
        timings = LoadTimings(SystemClock())
        with closing(fetcher.fetch(version, timings)):
            found = seen, time.monotonic(), time.process_time() - processor
        client.confirm(version)
        client.describe({"loaded": {"step": step}, "timings": dict(timings)})  # as followers do
        return found

    return fetch


def _published(client: Any, step: int) -> Any:
    version = client.latest_version()
    return version if version is not None and version.step == step else None


def _copy(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as file, target.open("wb", buffering=0) as copy:
        while piece := file.read(_PIECE):
            copy.write(piece)


def _apply(way: str, source: Path, target: Path) -> None:
    """Change this reader's copy in place."""
    words: Words = np.memmap(target, np.uint16, "r+")
    parts = _parts(source.read_bytes())
    for begin in range(0, words.size, _WORDS):
        tile = words[begin : begin + _WORDS]
        if way == "xor":
            stored: tuple[Any, ...] = next(parts), next(parts)
        else:
            stored = np.frombuffer(next(parts), np.int32), np.frombuffer(next(parts), np.uint16), next(parts)
        _CODECS[way].apply(tile, stored)


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        begin = at + _LENGTH
        at = begin + int.from_bytes(data[at:begin], "little")
        yield data[begin:at]


if __name__ == "__main__":
    main()
