"""A broadcast of weights against files, against one plain broadcast a tensor, and against what the link carries.

    python benchmarks/broadcast.py [--gib 0.1,0.5] [--receivers 1,4] [--rounds 5] [--bucket-mib 256]
                                   [--json out/broadcast.json] [--dir DIR]

The trainer and the receivers are processes of this host, all over gloo on loopback. Contestants take turns in one
run; each round begins with another one, and ratios are taken within a round. What counts is the time from the
trainer's call until the last receiver has the new weights in its parameters:

    broadcast         BroadcastSender, BroadcastReceiver: agreement, buckets, checksum, confirmation, copy
    files             StepSaver without an arena, `syncd watch`, followers that read through the page cache
    tensor by tensor  torch.distributed.broadcast of each parameter, in place: no agreement, checksum or way back
    one buffer        torch.distributed.broadcast of one buffer, until as many bytes went: what the link carries
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from broadcast_receiver import BROADCAST, FILES, LINK, LONG, TENSORS, Case, carry, join, receive_forever
from sync import make_weights

from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast.send import BroadcastSender
from syncd.protocol.layout import Job
from syncd.synchronizer import Synchronizer
from syncd.transports.base import SendContext
from syncd.transports.files.send import FilesSender
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.ranks import Ranks

WAYS = (BROADCAST, FILES, TENSORS, LINK)
_MARKS = 251
Rounds = dict[str, list[float]]


def main() -> None:
    """Run all cases and print what they take."""
    options = _options()
    figures: dict[str, Any] = {"bucket_mib": options.bucket_mib, "sizes": {}}
    scratch = Path(tempfile.mkdtemp(prefix="syncd-broadcast-", dir=options.dir))
    loads: list[float] = []
    try:
        for gib in options.gib:
            found: dict[str, Any] = {"receivers": {}}
            figures["sizes"][str(gib)] = found
            for count in options.receivers:
                found["receivers"][str(count)] = case = _apart(
                    scratch / f"{gib}-{count}", options, gib, count
                )
                found["bytes"], found["tensors"] = case.pop("bytes"), case.pop("tensors")
                loads.append(round(os.getloadavg()[0], 1))
        figures["machine"] = report.machine(scratch, torch=torch.__version__, load=report.span(loads))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print(figures)
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gib", type=_list(float), default=(0.1, 0.5), help="sizes of the weights: 0.1,0.5,4"
    )
    parser.add_argument("--receivers", type=_list(int), default=(1, 4), help="numbers of receivers: 1,2,4")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--bucket-mib", type=int, default=256, help="MiB of a bucket")
    parser.add_argument("--json", default="out/broadcast.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; files go through its file system")
    return parser.parse_args()


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(one) for one in text.split(","))


class Sender:
    """The trainer's end of each way.

    Args:
        case: What is measured.
        weights: What is sent; one element says which step it is, so that receivers can be checked.
        bucket_mib: MiB of a bucket.
        opened: What is closed with it.
    """

    def __init__(
        self, case: Case, weights: dict[str, torch.Tensor], bucket_mib: int, opened: ExitStack
    ) -> None:
        self._weights, self.step = weights, 0
        self._buffer, self._size = join(case, 0), case.bytes
        job = Job.at(f"{case.place}/job")
        sync = opened.enter_context(Synchronizer.open(job.root, "trainer", timeout=LONG))
        settings = SyncSection(bucket_mib=bucket_mib, ready_timeout=LONG, broadcast_timeout=LONG)
        context = SendContext(job, Ranks(), settings, sync)
        sender = BroadcastSender(context, FilesSender.open(context))
        self._sender = opened.enter_context(closing(sender))
        self._saver = opened.enter_context(closing(StepSaver(job, 0, 1, mode="stream")))

    def send(self, way: str) -> None:
        """Hand the weights of the next step out by one way."""
        attempt = f"bench-{self.step}"
        if way == BROADCAST:
            assert self._sender.broadcast(self.step, attempt, self._weights.items), "a broadcast has failed"
        elif way == FILES:
            self._saver.save(self.step, attempt, self._weights.items())
            self._saver.wait()
        elif way == TENSORS:
            for tensor in self._weights.values():
                dist.broadcast(tensor, 0)
        else:
            carry(self._buffer, self._size)

    def mark(self) -> int:
        """Make the next step, and return what says which one it is."""
        self.step += 1
        mark = self.step % _MARKS
        self._weights["p0"][0] = self._buffer[0] = mark
        return mark


def _apart(place: Path, options: argparse.Namespace, gib: float, count: int) -> dict[str, Any]:
    """Return the figures of a case, taken by a process of its own: forked before there is any thread."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_case, args=(there, place, options, gib, count))
    process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        answer = "the case has ended without a word"
    finally:
        process.join(LONG)
        process.kill()
    shutil.rmtree(place, ignore_errors=True)
    if isinstance(answer, str):
        raise RuntimeError(answer)  # noqa: TRY004 - what the case died of
    found: dict[str, Any] = answer
    return found


def _case(pipe: Connection, place: Path, options: argparse.Namespace, gib: float, count: int) -> None:
    try:
        pipe.send(_measure(place, options, gib, count))
    except BaseException:  # noqa: BLE001 - whoever waits must hear of it
        pipe.send(traceback.format_exc())


def _measure(place: Path, options: argparse.Namespace, gib: float, count: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    weights = make_weights(gib)
    case = Case(str(place), {name: tuple(tensor.shape) for name, tensor in weights.items()}, count + 1)
    rounds: Rounds = {way: [] for way in WAYS}
    (job := place / "job").mkdir(parents=True)
    with report.running_daemon(job, *report.KEEP_NEWEST), _receivers(case) as pipes, ExitStack() as opened:
        sender = Sender(case, weights, options.bucket_mib, opened)
        for pipe in pipes:
            _answer(pipe)
        for number in range(options.rounds + 1):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                took = _one(sender, pipes, way)
                if number:
                    rounds[way].append(took)
        for pipe in pipes:
            pipe.send(None)
        dist.destroy_process_group()
    return {"bytes": case.bytes, "tensors": len(weights), "rounds": rounds}


def _one(sender: Sender, pipes: list[Connection], way: str) -> float:
    """Return the seconds until the last receiver had the weights."""
    mark = sender.mark()
    for pipe in pipes:
        pipe.send(way)
    for pipe in pipes:
        _answer(pipe)  # it is waiting for the new weights now
    began = time.monotonic()
    sender.send(way)
    answers = [_answer(pipe) for pipe in pipes]
    assert all(answer["weights"] == mark for answer in answers), "a receiver has something else"
    return max(answer["ended"] for answer in answers) - began


@contextmanager
def _receivers(case: Case) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(case.world_size - 1):
        here, there = context.Pipe()
        processes.append(context.Process(target=receive_forever, args=(there, case, number), daemon=True))
        processes[-1].start()
        there.close()  # so that a receiver that is killed is noticed
        pipes.append(here)
    try:
        yield pipes
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def _answer(pipe: Connection) -> dict[str, float]:
    if not pipe.poll(LONG):
        raise TimeoutError("a receiver says nothing")
    try:
        answer: dict[str, float] | str = pipe.recv()
    except EOFError:
        raise RuntimeError("a receiver has ended without a word: dmesg | tail") from None
    if isinstance(answer, str):
        raise RuntimeError(answer)  # noqa: TRY004 - what a receiver died of
    return answer


def _print(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    for gib, found in figures["sizes"].items():
        print(f"\n{gib} GiB in {found['tensors']} tensors; seconds, median (least-most), share of the link")
        for count, case in found["receivers"].items():
            rounds: Rounds = case["rounds"]
            print(f"  {count} receivers")
            for way in WAYS:
                share = _ratio(rounds[LINK], rounds[way])
                print(f"    {way:<18} {report.spread(rounds[way], 3):>24} {share:>6.2f}")
            against = [f"{_ratio(rounds[way], rounds[BROADCAST]):.2f} x as fast as {way}" for way in WAYS[1:]]
            carried = statistics.median(found["bytes"] / (1 << 30) / took for took in rounds[LINK])
            print(f"    broadcast: {', '.join(against)}; the link: {carried:.2f} GiB/s to each")


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


if __name__ == "__main__":
    main()
