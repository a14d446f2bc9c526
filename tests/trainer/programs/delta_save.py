"""Stores steps of a sharded model as deltas and whole, as one rank of torchrun: delta_save.py PLACE

Steps 1 to 5 are stored. The save of step 6 fails on rank 1, that of step 7 succeeds. In the save of step 8 rank 1 is
killed after it has encoded its changes.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from support.delta_saves import DeltaTrainer, explorer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncd.errors import StorageError
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.writer import StepWriter
from syncd.transports.ranks import RankGroup

FAILS, KILLED = 6, 8


def sharded(mesh):
    """Return a model whose parameters are spread over the ranks."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(1500, 1203), torch.nn.Linear(1203, 700), torch.nn.LayerNorm(700)]
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def train(model, seed):
    """Change a few values of this rank's parts."""
    torch.manual_seed(seed * dist.get_world_size() + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            part = parameter.to_local()
            part[torch.rand_like(part) < 0.02] *= 1.01


def write(self, name, *args, **kwargs):
    if self.step == FAILS and "delta-" in name and dist.get_rank() == 1:
        raise StorageError("refused by the test")
    return WRITE(self, name, *args, **kwargs)


def receipt(self, *args, **kwargs):
    if self.step == KILLED and "whole" not in self.path and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return RECEIPT(self, *args, **kwargs)


WRITE, RECEIPT = StepWriter.write, StepWriter.receipt


def main(place):
    dist.init_process_group("gloo")
    StepWriter.write, StepWriter.receipt = write, receipt
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
    trainer = DeltaTrainer(place, RankGroup(120))
    reader = explorer(trainer.job, "reader", READS_DELTA) if dist.get_rank() == 0 else None
    for step in range(1, KILLED + 1):
        train(model, step)
        if reader is not None:
            reader.update()
        try:
            trainer.store(step, model.state_dict().items)
        except StorageError:
            assert step == FAILS
            trainer.plain.wait()
        else:
            assert step != FAILS


if __name__ == "__main__":
    main(sys.argv[1])
