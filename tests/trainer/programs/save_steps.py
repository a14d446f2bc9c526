"""Saves steps as one rank of a trainer: save_steps.py JOB RANK WORLD_SIZE FIRST LAST MODE [OPTION ...]

--gloo PORT     gather each tensor by a collective, as a sharded engine does
--slow SECONDS  wait before each piece is written
--large MIB     size of one tensor
--ready FILE    made once the first save has returned
"""

import argparse
import sys
import time

import torch

from syncd.errors import SyncdError
from syncd.protocol.layout import Job
from syncd.transports.files.shard import NewFile
from syncd.transports.files.step_saver import StepSaver


def weights(step, mib):
    """Yield tensors whose content follows from the step."""
    for number in range(7):
        yield f"layers.{number}.weight", torch.full((50 + number, 17), float(step * 10 + number))
    if mib:
        yield "large", torch.full((mib << 18,), float(step))


def gathered(step, mib):
    """Yield the same, each tensor made whole by all ranks together."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, tensor in weights(step, mib):
        part = tensor if rank == 0 else torch.zeros_like(tensor)
        torch.distributed.all_reduce(part)
        assert world_size > rank
        yield name, part


def slow_down(seconds):
    """Make every write of data wait first."""
    write = NewFile.write

    def late(self, piece, offset):
        if len(piece) > 4096:
            time.sleep(seconds)
        write(self, piece, offset)

    NewFile.write = late


def main(options):
    if options.slow:
        slow_down(options.slow)
    if options.gloo:
        address = f"tcp://127.0.0.1:{options.gloo}"
        torch.distributed.init_process_group(
            "gloo", init_method=address, rank=options.rank, world_size=options.world_size
        )
    export = gathered if options.gloo else weights
    saver = StepSaver(Job.at(options.job), options.rank, options.world_size, mode=options.mode, timeout=60)
    for step in range(options.first, options.last + 1):
        attempt = f"{options.attempt}-{step}"
        saver.save(step, attempt, lambda step=step: export(step, options.large), {"config.json": b"{}"})
        if options.ready:
            with open(options.ready, "w", encoding="ascii"):
                pass
    saver.close()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("mode")
    parser.add_argument("--attempt", default="a")
    parser.add_argument("--gloo", type=int)
    parser.add_argument("--slow", type=float)
    parser.add_argument("--large", type=int, default=0)
    parser.add_argument("--ready")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse())
    except SyncdError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
