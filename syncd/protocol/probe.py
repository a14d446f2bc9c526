"""Probes: a few fixed token sequences, and the log-prob that the trainer's model gives to each of their tokens.

A probe travels with the version whose weights it was computed from: in writer 1's receipt, in the manifest, and in a
broadcast's round. An engine that runs these weights gives the same tokens the same log-probs. The probe of the model
that the job started from, the baseline, is recorded once a job. docs/probe-format.md has the rules.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.disk import MISSING, Disk, exists
from syncd.protocol.documents import MAX_INTEGER, Document, Fields, as_document, encode, read_document
from syncd.protocol.layout import Job
from syncd.protocol.owner import refuse_mirrored

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
EXPORT_DTYPES = (*COMPUTE_DTYPES, "keep")

MAX_TOKENS = 4096
"""Tokens of all sequences together; a probe of 64 shows a fault, and this one still fits into a presence."""

_LEAST = 2
_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Probe:
    """Token sequences and the trainer's log-probs.

    Log-probs are rounded to 7 significant digits, so that a probe that is written and read again is equal.

    Args:
        tokens: Sequences of token ids, each of at least 2.
        logprobs: For each sequence, the natural logarithm of the probability of each token after the first.
        compute_dtype: What the trainer's forward pass computes in: float32, bfloat16 or float16.
        export_dtype: What the tensors of the version were cast to: the same words, or keep if they were not.

    Raises:
        UsageError: It is no probe: another number of log-probs, one that is not finite, too many tokens, ...
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    compute_dtype: str
    export_dtype: str

    def __post_init__(self) -> None:
        if problem := _problem(self.tokens, self.logprobs, self.compute_dtype, self.export_dtype):
            raise UsageError(problem)
        object.__setattr__(self, "tokens", tuple(map(tuple, self.tokens)))
        object.__setattr__(self, "logprobs", tuple(tuple(map(_rounded, row)) for row in self.logprobs))

    @staticmethod
    def from_fields(fields: Fields) -> "Probe":
        """Return the probe of one JSON object.

        Raises:
            CorruptDataError: It is not one, or its digest is of other tokens.
        """
        dtypes = fields.text("compute_dtype"), fields.text("export_dtype")
        rows, values = fields.items("tokens"), fields.items("logprobs")
        try:
            probe = Probe(tuple(rows), tuple(values), *dtypes)
        except UsageError as error:
            raise CorruptDataError(error.message, path=fields.path) from None
        if probe.digest != fields.text("digest"):
            raise fields.wrong("digest", "the digest of the tokens")
        return probe

    @property
    def digest(self) -> str:
        """Return the digest of the tokens alone: two probes with the same one can be compared."""
        text = json.dumps(self.tokens, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @property
    def count(self) -> int:
        """Return the number of log-probs."""
        return sum(map(len, self.logprobs))


def probe_document(probe: Probe) -> Document:
    return as_document(probe) | {"digest": probe.digest}


def read_probe(disk: Disk, path: str) -> Probe:
    return Probe.from_fields(read_document(disk, path))


def encode_probe(probe: Probe, **more: Any) -> bytes:
    """Return the content of the file of a probe, with more fields."""
    return encode(probe_document(probe) | more)


def read_base_probe(job: Job) -> Probe | None:
    """Return the baseline, the probe of the model that the job started from; None if none was recorded."""
    try:
        return read_probe(job.disk, job.base_probe)
    except MISSING:
        return None


def write_base_probe(job: Job, probe: Probe, model: str) -> None:
    """Record the baseline, unless there is one already.

    Args:
        model: The path of that model, as the job's file has it.
    """
    if not exists(job.disk, job.base_probe):
        refuse_mirrored(job, "a baseline of its own")
        job.disk.make_directory(job.state)
        job.disk.replace(job.base_probe, encode_probe(probe, model=model))


def _problem(tokens: Sequence[Any], logprobs: Sequence[Any], compute: object, export: object) -> str:
    """Return why these are not the parts of a probe, empty if they are."""
    if compute not in COMPUTE_DTYPES or export not in EXPORT_DTYPES:
        return f"a probe has a dtype other than {', '.join(EXPORT_DTYPES)}"
    if not tokens or not all(map(_is_sequence, tokens)):
        return f"a probe has a sequence that is not a list of at least {_LEAST} token ids"
    if sum(map(len, tokens)) > MAX_TOKENS:
        return f"a probe has more than {MAX_TOKENS} tokens"
    if len(logprobs) != len(tokens) or not all(map(_is_answer, logprobs, tokens)):
        return "a probe has not one finite log-prob for each token after the first of its sequence"
    return ""


def _is_sequence(row: object) -> bool:
    return (
        isinstance(row, list | tuple)
        and len(row) >= _LEAST
        and all(type(token) is int and 0 <= token < MAX_INTEGER for token in row)
    )


def _is_answer(row: object, tokens: Sequence[int]) -> bool:
    return (
        isinstance(row, list | tuple)
        and len(row) == len(tokens) - 1
        and all(type(value) in (int, float) and _is_finite(value) for value in row)
    )


def _is_finite(value: float) -> bool:
    return abs(value) <= MAX_INTEGER and math.isfinite(value)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
