"""Programs as processes forked from one that has imported torch: the import is most of what they cost."""

import multiprocessing
import os
import runpy
import sys

_PRELOADED = (
    "trainer.run",
    "trainer.engines.files",
    "syncd.transports.files.step_saver",
    "explorer_hooks.follower.follower",
    "syncd.experience.table",
    # What comes with the first step of an optimizer, the first batch, and the look at a tokenizer.
    "torch._dynamo",
    "pandas",
    "transformers.tokenization_python",
)


def start(log, environment, *argv, more=()):
    """Start a program, `FILE ...` or `-m MODULE ...`, and return its process; what it says goes to a file.

    What reads the environment at its import has that of the first call. Torch is told its number of threads.

    Args:
        log: The file.
        environment: Variables beside our own.
        argv: The program and its arguments.
        more: Modules that are imported before, from the first call on.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *more])
    process = context.Process(target=_become, args=(log, environment, argv))
    process.start()
    return process


def _become(log, environment, argv):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(output, target)
    os.environ.update(environment)
    # Where torch is not imported yet, it reads the variable itself.
    if (threads := environment.get("OMP_NUM_THREADS")) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
