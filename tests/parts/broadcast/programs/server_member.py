"""`explorer run` with a server as a process that says at its end what that server runs.

server_member.py FILE JOB IDENTITY KIND PORT

It writes, into JOB.IDENTITY.json, why it ended and what the engine says of itself.
"""

import gc
import json
import sys
import urllib.request

import torch
from receive import sockets

from explorer_hooks.run.load import load_file
from explorer_hooks.run.run import run


def main(file, job, identity, kind, port):
    torch.set_num_threads(1)
    gc.disable()  # a circle would keep a group's sockets open until it is found
    address = f"http://127.0.0.1:{port}"
    engine = [f"--explorer.engine.{key}={value}" for key, value in (("kind", kind), ("address", address))]
    why = run(load_file(file, [f"--explorer.name={identity}", "--explorer.engine.timeout=20", *engine]))
    with urllib.request.urlopen(f"{address}/state", timeout=60) as answer:
        found = {"why": why, **json.load(answer)}
    with open(f"{job}.{identity}.json", "w", encoding="ascii") as written:
        json.dump({**found, "sockets": sockets()}, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
