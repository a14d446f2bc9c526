"""What is wrong with the teacher in the job's file and no single key shows."""

from collections.abc import Iterator

from explorer_hooks.parts.evaluation.tables import TeacherSection
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem


def teacher_problems(file: JobFile, _: str) -> Iterator[Problem]:
    teacher, key = file.explorer.part(TeacherSection), "explorer.teacher.address"
    if not teacher.address:
        if teacher != TeacherSection():
            yield Problem(key, f"[explorer.teacher] needs {key}", 'address = "http://127.0.0.1:8001"')
        return
    if not teacher.address.startswith(("http://", "https://")):
        yield Problem(key, f"{key} is no address of a server", 'address = "http://127.0.0.1:8001"')
    if file.algorithm.temperature != 1:
        text = "a teacher gives log-probs at temperature 1, and responses are of another temperature"
        yield Problem("algorithm.temperature", text, "temperature = 1.0, or no teacher")
