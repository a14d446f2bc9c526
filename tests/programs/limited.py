"""Runs one command line of syncd, or a program of Python, with a bounded address space: limited.py BYTES WHAT ..."""

import resource
import runpy
import sys

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
if sys.argv[2].endswith(".py"):
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    from syncd.cli.main import main

    sys.argv = ["syncd", *sys.argv[2:]]
    main()
