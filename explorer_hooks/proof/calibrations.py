"""What calibration has measured of a kind of engine, kept in the job for followers and engines that start again."""

import hashlib
from typing import NamedTuple

from explorer_hooks.hook import ProbeAnswer, ProbingHook
from syncd.errors import SyncdError
from syncd.protocol.documents import encode, read_document
from syncd.protocol.layout import Job
from syncd.protocol.probe import Probe, encode_probe


class Calibration(NamedTuple):
    """The noise between trainer and engine at the start model, in nats, and the engine's answers there."""

    mean: float
    answers: tuple[ProbeAnswer, ...]


class Calibrations:
    """The calibrations of one job, by release, flags and dtype of the engine, and by the baseline."""

    def __init__(self, job: Job, hook: ProbingHook) -> None:
        self._job, self._hook = job, hook

    def keep(self, baseline: Probe, calibration: Calibration) -> None:
        """Keep what was measured; on a mount that fails it is measured again."""
        rows = [answer.logprobs for answer in calibration.answers]
        try:
            self._job.disk.make_directory(self._job.calibrations)
            self._job.disk.replace(self._path(baseline), encode({"mean": calibration.mean, "answers": rows}))
        except OSError:
            return

    def recall(self, baseline: Probe) -> Calibration | None:
        """Return what was measured of such an engine, None if that is not known."""
        try:
            fields = read_document(self._job.disk, self._path(baseline))
            answers = tuple(_answer(rows, baseline) for rows in fields.items("answers"))
            return Calibration(fields.number("mean"), answers)
        except (OSError, SyncdError, ValueError):
            return None

    def _path(self, baseline: Probe) -> str:
        kind = f"{self._hook.engine_kind()}, {self._hook.dtype()}\n".encode()
        return (
            f"{self._job.calibrations}/{hashlib.sha256(kind + encode_probe(baseline)).hexdigest()[:32]}.json"
        )


def _answer(rows: object, baseline: Probe) -> ProbeAnswer:
    """Return the answer of one replica; a probe of it has the checks."""
    probe = Probe(baseline.tokens, tuple(rows) if isinstance(rows, list) else (), "float32", "float32")
    return ProbeAnswer(probe.logprobs)
