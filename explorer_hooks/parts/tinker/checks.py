"""What is wrong with the inference engine `tinker` in the job's file and no single key shows."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem


def tinker_problems(file: JobFile, _: str) -> Iterator[Problem]:
    engine = file.explorer.engine
    if engine.kind == "tinker" and engine.options:
        yield Problem("explorer.engine.options", 'explorer.engine.options has no effect with kind = "tinker"')
