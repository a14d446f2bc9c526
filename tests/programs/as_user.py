"""Runs a command line of syncd, or a program, as another user: as_user.py USER GROUP|- WHAT ...

All is imported first: the user may not be able to read where Python or this checkout is.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import syncd
from syncd.cli.main import main

PACKAGES = ("cli", "client", "daemon", "daemon.foreign", "observe", "protocol", "security", "stall", "views")
NAMES = (
    "syncd.publishing",
    "syncd.synchronizer",
    "argparse",
    "concurrent.futures.thread",
    "encodings.ascii",
    "encodings.idna",
    "grp",
    "rich.console",
    "structlog.dev",
    "tomllib",
)

for package in PACKAGES:
    path = f"{syncd.__path__[0]}/{package.replace('.', '/')}"
    for module in pkgutil.iter_modules([path], f"syncd.{package}."):
        if module.name != "syncd.observe.metrics":
            importlib.import_module(module.name)
for name in NAMES:
    importlib.import_module(name)

user, group, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
program = compile(Path(what).read_bytes(), what, "exec") if what.endswith(".py") else None
sys.argv = [what, *sys.argv[4:]] if program else ["syncd", *sys.argv[3:]]
sys.path.insert(0, os.path.dirname(what))
os.setgroups([] if group == "-" else [int(group)])
os.setgid(user)
os.setuid(user)
os.umask(0o077)  # without a policy nobody could read what the others make
os.chdir("/")
if program is None:
    main()
else:
    exec(program, {"__name__": "__main__", "__file__": what})
