"""`explorer run` as a process that says at its end what its parameters are.

member.py FILE JOB IDENTITY [FAULT]

It writes, into JOB.IDENTITY.json, why it ended and the digest of its parameters. Faults are those of receive.py.
"""

import json
import sys

import torch
from receive import arm, digest, sockets

from explorer_hooks.run import local
from explorer_hooks.run.load import load_file
from explorer_hooks.run.run import run


def main(file, job, identity, fault=""):
    torch.set_num_threads(1)
    if fault:
        arm(fault)
    open_hook, models = local.open_hook, []

    def kept(file):
        hook = open_hook(file)
        models.append(hook.model)
        return hook

    local.open_hook = kept
    why = run(load_file(file, [f"--explorer.name={identity}"]))
    found = {"why": why, "digest": digest(models[0]), "sockets": sockets()}
    with open(f"{job}.{identity}.json", "w", encoding="ascii") as written:
        json.dump(found, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
