"""A follower that is killed after the engine was paused and has read the weights, and before it is resumed.

dying_follower.py JOB HOOK ADDRESS
"""

import os
import signal
import sys

from explorer_hooks.finding import open_hook
from explorer_hooks.follower.follower import Follower, FollowOptions


def main(job, name, address):
    hook = open_hook(f"{name}={address}", timeout=60.0)
    hook._resume = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with Follower.open(job, hook, "e0", FollowOptions(poll=0.02, stay=True)) as follower:
        print("following", flush=True)
        follower.turn(300.0)


main(*sys.argv[1:])
