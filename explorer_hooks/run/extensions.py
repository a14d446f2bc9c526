"""The groups of entry points by which parts extend explorers, and what a job's file asks of them in vain."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.jobfile.roles import ReaderSection, RunnerSection, given_tables
from syncd.registered import registered

RUNNERS = "explorer.runners"
"""What explores in place of prompts, by the table of [explorer] that asks for it: functions of file and address."""

EVALUATION = "explorer.evaluation"
"""What opens evaluation sets: a function of a file and what scores (`explorer_hooks/run/held_out.py`)."""

READERS = "explorer.readers"
"""What reads all that is sampled for training, by its table of [explorer]: functions of file and tokens."""

CHECKS = "explorer.checks"
"""What is wrong with tables of parts and no single key shows: functions of a file and the command that reads it."""


def lacking_problems(file: JobFile) -> Iterator[Problem]:
    explorer = file.explorer
    lacking = [name for name in given_tables(explorer, RunnerSection) if name not in registered(RUNNERS)]
    lacking += [name for name in given_tables(explorer, ReaderSection) if name not in registered(READERS)]
    lacking += ["evaluation"] if explorer.evaluation.named() and not registered(EVALUATION) else []
    for name in lacking:
        text = f"nothing that reads [explorer.{name}] is installed"
        yield Problem(f"explorer.{name}", text, "leave the table out")
