"""Writes batches: each becomes visible whole and durable or not at all, and no number is used twice."""

import os
import uuid
from collections.abc import Sequence

from syncd.context import Closing
from syncd.errors import FencedError, StorageError, storage_error, storage_errors
from syncd.experience import batch_paths
from syncd.experience.model import Experience
from syncd.experience.table import encode_batch
from syncd.protocol.disk import MISSING, exists, list_if_there, remove_tree
from syncd.protocol.documents import encode
from syncd.protocol.layout import Job, check_identity


class ExperienceWriter(Closing):
    """The one writer of an explorer's batches.

    A batch is prepared inside a directory of this process and renamed from there. A later writer of the same
    identity removes that directory first: an earlier one that is still about finds its renames failing.

    Args:
        job: The job; its directory must be there.
        explorer: The identity, which no other process writes under meanwhile.

    Raises:
        UsageError: The identity cannot be a file name.
        StorageError: The job directory cannot be written to.
    """

    def __init__(self, job: Job, explorer: str) -> None:
        self.job, self.explorer = job, check_identity(explorer)
        self._place = f"{batch_paths.writers(job, explorer)}/{uuid.uuid4().hex}"
        with storage_errors(batch_paths.root(job)):
            job.disk.list(job.root)
            job.disk.make_directory(self._place)
            self._fence_others()
            job.disk.make_directory(batch_paths.batches(job, explorer))
            self.upcoming = self._first_free()
            """The number of the next batch: above all that this identity's writers ever made visible."""
            self._rest_files = batch_paths.rest_files(job, explorer)

    @property
    def written(self) -> int:
        """Return how many batches this identity has written; one that was too large for a file counts once."""
        return self.upcoming - 1 - self._rest_files

    def replace(self, path: str, data: bytes) -> None:
        """Replace a file that belongs to this explorer, durably; fenced as its batches are.

        Raises:
            FencedError: A later process writes under this identity.
            StorageError: It could not be written.
        """
        try:
            self.job.disk.make_directory(os.path.dirname(path))
            self.job.disk.replace(path, data, via=self._place)
        except OSError as error:
            raise self._failure(error, path) from error

    def write(self, experiences: Sequence[Experience]) -> str:
        """Write one batch durably and return its path.

        Raises:
            UsageError: The batch is empty or too large.
            FencedError: A later process writes under this identity.
            StorageError: It could not be written; nothing of it is visible unless the message says so.
        """
        return self.write_encoded(encode_batch(experiences))

    def write_encoded(self, data: bytes, *, is_rest: bool = False) -> str:
        """Write the bytes of a batch durably and return its path; errors as those of `write`.

        `is_rest` says that the batch before was too large for a file, and that this is the rest of it.
        """
        if is_rest:
            document = encode({"files": self._rest_files + 1})
            self.replace(batch_paths.rest(self.job, self.explorer), document)
            self._rest_files += 1
        path = batch_paths.batch(self.job, self.explorer, self.upcoming)
        try:
            self.job.disk.replace(path, data, via=self._place)
        except OSError as error:
            self._explain(error, path)
        self.upcoming += 1
        return path

    def close(self) -> None:
        """Remove what this process has prepared; what it has written stays."""
        remove_tree(self.job.disk, self._place)

    def _fence_others(self) -> None:
        above, own = self._place.rsplit("/", 1)
        for entry in list_if_there(self.job.disk, above):
            if entry.name != own:
                remove_tree(self.job.disk, f"{above}/{entry.name}")

    def _first_free(self) -> int:
        # The batches first: what the trainer moves away meanwhile is then found where it went.
        taken = batch_paths.numbers(self.job, batch_paths.batches(self.job, self.explorer))
        taken |= batch_paths.numbers(self.job, batch_paths.rejected(self.job, self.explorer))
        return max(taken | {batch_paths.consumed_through(self.job, self.explorer)}) + 1

    def _explain(self, error: OSError, path: str) -> None:
        """Raise the error of a failed write; return if the batch is visible and durable all the same."""
        failure = self._failure(error, path)
        # Once this process is fenced, a batch of that number is another's.
        if not isinstance(failure, FencedError) and exists(self.job.disk, path):
            try:
                self.job.disk.sync_directory(path.rpartition("/")[0])
            except OSError as again:
                self.upcoming += 1
                failed = storage_error(again, path)
                failed.message = f"the batch is visible, but may not outlast a power cut: {failed.message}"
                raise failed from error
            return
        raise failure from error

    def _failure(self, error: OSError, path: str) -> FencedError | StorageError:
        """Return the error of a write that failed: a fence if the directory of this process is gone."""
        if not isinstance(error, MISSING) or self._is_there():
            return storage_error(error, path)
        return FencedError(
            f"a later process writes as explorer {self.explorer}",
            path=self._place,
            hint="give each explorer a different identity",
        )

    def _is_there(self) -> bool:
        """Return whether this process still has its directory; a listing asks the server, a stat may be cached."""
        try:
            self.job.disk.list(self._place)
        except MISSING:
            return False
        return True
