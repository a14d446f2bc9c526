"""Where a ready explorer keeps its own files: JOB/explorers/<identity>/."""

from syncd.protocol.layout import Job


def home(job: Job, explorer: str) -> str:
    """Return the directory of an explorer's own files."""
    return f"{job.root}/explorers/{explorer}"


def state(job: Job, explorer: str) -> str:
    """Return the file that says how far its tasks are done."""
    return f"{home(job, explorer)}/state.json"


def metrics(job: Job, explorer: str) -> str:
    """Return the JSONL file with a line for each batch."""
    return f"{home(job, explorer)}/metrics.jsonl"


def evaluations(job: Job, explorer: str) -> str:
    """Return the JSONL file with a line for each evaluation."""
    return f"{home(job, explorer)}/evaluations.jsonl"
