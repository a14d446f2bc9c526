"""Whether a job has ended: what it was to reach is reached, or its trainer has gone."""

import time

from explorer_hooks.run.weight_sources import WeightSource, storage_errors_pass
from syncd.errors import TimedOutError
from syncd.protocol.job_end import LastVersion, read_end

_EVERY = 1.0  # seconds between two reads of what the job has reached


class JobWatch:
    """Watches a job for its end, also because no trainer came in `timeout` seconds."""

    def __init__(self, source: WeightSource, timeout: float) -> None:
        self._source, self._timeout = source, timeout
        self._trainer_seen_at = time.monotonic()
        self._end_read_at = float("-inf")
        self._last_version = LastVersion()

    def reason(self) -> str:
        if end := self._end_of_job():
            return f"the job is finished: {end}"
        return "the trainer is gone" if self._trainer_is_gone() else ""

    def _end_of_job(self) -> str:
        """Return what the job has reached once its last version is published, whatever presence files say."""
        now = time.monotonic()
        if now - self._end_read_at < _EVERY:
            return ""
        self._end_read_at, end = now, read_end(self._source.client.job)
        newest = None if end is None else self._source.newest()
        has_come = self._last_version.has_come(end, newest, now)
        return end.reason if end is not None and has_come else ""

    def _trainer_is_gone(self) -> bool:
        client, is_gone = self._source.client, False
        with storage_errors_pass():
            is_gone = client.trainer_requires_weight_sync() is None
        if is_gone:
            return True
        now = time.monotonic()
        if client.trainers.last():
            self._trainer_seen_at = now
        elif now - self._trainer_seen_at > self._timeout:
            raise TimedOutError(
                f"no trainer has come for {self._timeout:g} s",
                hint="start `trainer train`, or give a longer sync.timeout",
            )
        return False
