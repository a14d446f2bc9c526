"""A server as a hook with reload=restart starts it: a fake vLLM with the weights of the directory that it is given.

restarted_server.py MODEL PORT PLACE: PLACE/faults.json says what it does wrong, by a part of MODEL; PLACE/starts gets
a line for each start, with the process and that of a child that it leaves in its group. PLACE/hung appears once it
hangs.
"""

import json
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from support.fake_engines import FakeVllm, read_shard


def fault_of(place, model):
    if not os.path.exists(f"{place}/faults.json"):
        return ""
    with open(f"{place}/faults.json") as file:
        return next((fault for part, fault in json.load(file).items() if part in model), "")


def weights_of(model):
    found = {}
    for name in sorted(os.listdir(model)):
        if name.endswith(".safetensors"):
            found |= {key: data for key, (_, data, _) in read_shard(f"{model}/{name}").items()}
    return found


def main(model, port, place):
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{place}/starts", "a") as file:
        file.write(f"{os.getpid()} {child.pid} {model}\n")
    fault = fault_of(place, model)
    if fault == "dies":
        sys.exit("out of memory")
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "hangs":
        open(f"{place}/hung", "w").close()
    else:
        weights = weights_of(model)
        if fault == "answers wrongly":
            weights = {name: bytes(len(data)) for name, data in weights.items()}
        FakeVllm.start_weights, FakeVllm.started_from, FakeVllm.port = weights, model, int(port)
        FakeVllm()
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
