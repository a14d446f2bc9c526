"""The groups of entry points by which parts extend explorers, and what a job's file asks of them in vain."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.registered import registered

RUNNERS = "explorer.runners"
"""What explores in place of prompts, by the table of [explorer] that asks for it: functions of file and address."""

EVALUATION = "explorer.evaluation"
"""What opens evaluation sets: a function of a file and what scores (`explorer_hooks/run/held_out.py`)."""

READERS = "explorer.readers"
"""What reads all that is sampled for training, such as a teacher: functions of file and tokens."""

ENGINES = "explorer.engines"
"""Further inference engines, by `explorer.engine.kind`: functions of a file."""


def lacking_problems(file: JobFile) -> Iterator[Problem]:
    """Yield the tables of a file that nothing that is installed reads."""
    explorer = file.explorer
    asked = (
        ("explorer.agent", explorer.agent.is_given, RUNNERS),
        ("explorer.evaluation", bool(explorer.evaluation.named()), EVALUATION),
        ("explorer.teacher", bool(explorer.teacher.address), READERS),
    )
    for table, is_asked, group in asked:
        if is_asked and not registered(group):
            yield Problem(table, f"nothing that reads [{table}] is installed", "leave the table out")
