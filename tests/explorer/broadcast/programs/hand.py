"""A hook that is killed while it hands a version to its engine.

hand.py KIND ADDRESS MODEL SEND      ends itself before its SENDth tensor
"""

import os
import signal
import sys

from transformers import AutoModelForCausalLM

from explorer_hooks.finding import open_hook
from syncd.transports.broadcast.process_group import ProcessGroup


def main(kind, address, directory, send):
    left, real = [int(send)], ProcessGroup.broadcast

    def counted(self, tensor, deadline):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, tensor, deadline)

    ProcessGroup.broadcast = counted
    hook = open_hook(f"{kind}={address}", timeout=20.0)
    hook.load_tensors("1.2+a", AutoModelForCausalLM.from_pretrained(directory).state_dict())


if __name__ == "__main__":
    main(*sys.argv[1:])
