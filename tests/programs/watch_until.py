"""Runs `syncd` until a version is published, then stops it as systemd does: watch_until.py JOB STEP ARGUMENT ..."""

import contextlib
import os
import signal
import sys
import threading
import time

from support import checker

from syncd.cli.main import main
from syncd.stall.worker import WorkerThread

PATIENCE = 60.0


def stop_at(job, step):
    ends, pair = time.monotonic() + PATIENCE, None
    while time.monotonic() < ends and not (pair and pair[1] >= step):
        time.sleep(0.02)
        # Calls are counted in this thread, too: one that looks for long meets the error itself.
        with contextlib.suppress(OSError):
            pair = checker.pair(job)
    os.kill(os.getpid(), signal.SIGTERM)


# strace counts each thread by itself: what asks the file system must be the first one, which starts the program.
WorkerThread.start = WorkerThread._run
threading.Thread(target=stop_at, args=(sys.argv[1], int(sys.argv[2])), daemon=True).start()
sys.argv = ["syncd", *sys.argv[3:]]
main()
