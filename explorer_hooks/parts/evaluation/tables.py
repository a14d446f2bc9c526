"""The table [explorer.teacher] of the job's file. Needs pydantic alone.

A key's description is its only documentation: the schema and docs/configuration.md are made of it.
"""

from typing import Literal

from syncd.jobfile.roles import ReaderSection
from syncd.jobfile.sections import Count, Positive, Seconds


class TeacherSection(ReaderSection):
    """A served model that is asked for its log-prob of each token of each response."""

    kind: Literal["vllm", "sglang"] = "vllm"
    """The server: vllm is asked by its completions API, sglang by /generate."""
    address: str = ""
    """The server's URL, such as http://127.0.0.1:8001; no teacher unless given."""
    model: str = ""
    """What requests and experiences call the teacher; what the server names first unless given."""
    token_env: str = ""
    """The environment variable that holds the server's API key."""
    concurrency: Positive = 8
    """Groups that are sent to it at the same time, each in one request."""
    timeout: Seconds = 120.0
    """Seconds that one request may take."""
    retries: Count = 4
    """Retries of a request that failed, each after a longer pause."""
    required: bool = True
    """Drop a group of which it gives no log-probs, and count it; false: write the group without."""

    @property
    def is_given(self) -> bool:
        return bool(self.address)
