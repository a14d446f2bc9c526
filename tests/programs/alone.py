"""Runs `syncd` in one thread: alone.py ARGUMENT ...

A verb works in a thread of its own, and strace counts the calls of each thread by itself: here there is one.
"""

import sys

from syncd.cli.main import run
from syncd.stall.worker import WorkerThread

WorkerThread.start = WorkerThread._run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
