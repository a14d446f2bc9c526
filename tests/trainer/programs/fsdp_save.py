"""Saves one model in all ways that it can leave a trainer, as one rank of torchrun: fsdp_save.py DIR

Below DIR, for a model with and without tied weights, the files of
verl's checkpoint manager; and the steps that StepSaver writes of the same module.
"""

import sys

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from support.saving import KINDS_OF_SAVE, config_of, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from syncd.protocol.layout import Job
from syncd.transports.files.step_saver import StepSaver


def spread(model, mesh):
    """Return the model with its layers and itself sharded by FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpoint(model, directory):
    """Have verl write what a resume needs of the weights."""
    contents = OmegaConf.create({"save_contents": ["model"], "load_contents": ["model"]})
    FSDPCheckpointManager(model, checkpoint_config=contents).save_checkpoint(directory)


def save_steps(model, job, companions):
    """Write one step in each mode and dtype."""
    for step, (mode, dtype) in enumerate(KINDS_OF_SAVE):
        saver = StepSaver(job, dist.get_rank(), dist.get_world_size(), mode=mode, dtype=dtype, timeout=60)
        saver.save(step, f"fsdp-{step}", lambda: model.state_dict().items(), companions)
        saver.close()


class Narrow(torch.nn.Module):
    """A module whose parameters have one row each: only rank 0 has a part of them."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.tied = (torch.nn.Linear(4, 1) for _ in range(3))
        self.tied.weight = self.one.weight


def save_narrow(mesh, job):
    """Write step 0 of a module of which rank 1 has nothing."""
    model = fully_shard(Narrow(), mesh=mesh)
    saver = StepSaver(job, dist.get_rank(), dist.get_world_size(), timeout=60)
    saver.prepare(model.state_dict().items())
    saver.save(0, "narrow", lambda: model.state_dict().items())
    saver.close()


def main(directory):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for tie in (False, True):
        model = tiny(tie)
        companions = config_of(model)
        spread(model, mesh)
        checkpoint(model, f"{directory}/{'tied' if tie else 'apart'}/global_step_3/actor")
        if not tie:
            save_steps(model, Job.at(f"{directory}/steps"), companions)
    save_narrow(mesh, Job.at(f"{directory}/narrow"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
