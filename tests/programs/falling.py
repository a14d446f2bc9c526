"""Runs `syncd` and signals itself at one rename: falling.py MOMENT NAME WHEN SIGNAL ARGUMENT ...

MOMENT is before or after the WHEN-th rename from or to a path that ends with NAME; SIGNAL is KILL or STOP.
"""

import itertools
import os
import signal
import sys

from syncd.cli.main import main

moment, name, when, fall = sys.argv[1:5]
rename, met = os.rename, itertools.count(1)


def falling(source, target):
    now = (source.endswith(name) or target.endswith(name)) and next(met) == int(when)
    if now and moment == "before":
        os.kill(os.getpid(), signal.Signals[f"SIG{fall}"])
    rename(source, target)
    if now and moment == "after":
        os.kill(os.getpid(), signal.Signals[f"SIG{fall}"])


os.rename = falling
sys.argv = ["syncd", *sys.argv[5:]]
main()
