"""One rank that runs cases: run_cases.py DIRECTORY ENGINE MODELS DEVICE RANK WORLD_SIZE PORT CASE ...

Each case is a function of one of the modules of `case_of`; what it returns is written to
DIRECTORY/<case>.<rank>.pt.
"""

import importlib
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from support import engine_cases

from syncd.transports.ranks import RankGroup


def main(directory, engine, models, device, rank, world_size, port, *names):
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=120),
    )
    bench = engine_cases.Bench(directory, engine, models, device, RankGroup(120))
    for name in names:
        torch.save(case_of(name)(bench), f"{directory}/{name}.{rank}.pt")
    dist.destroy_process_group()


def case_of(name):
    """Return a case; those of verl are looked for last, because it takes long to import what they need."""
    if name.startswith("legacy_"):
        return getattr(importlib.import_module("support.legacy_cases"), name)
    if name.startswith("megatron_"):
        return getattr(importlib.import_module("support.megatron_cases"), name)
    for module in (
        "engine_cases",
        "verl_cases",
        "critic_cases",
        "lora_cases",
        "algorithm_cases",
        "gpu_cases",
    ):
        cases = importlib.import_module(f"support.{module}")
        if hasattr(cases, name):
            return getattr(cases, name)
    raise LookupError(name)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001 -- whatever it is, the test is told
        traceback.print_exc()
        os._exit(1)  # not waiting for ranks that wait for this one
