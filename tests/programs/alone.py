"""Runs `syncd` in this very process: alone.py ARGUMENT ...

As a command it would work in a child process (syncd/stall/child.py). What is traced counts the calls of one process.
"""

import sys

from syncd.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
