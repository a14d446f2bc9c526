"""The published weights as a state dict: payload and version always belong together."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping

from syncd.client.base import public, reported
from syncd.client.following import Following
from syncd.client.lease import NATIVE, Leased
from syncd.client.payload import Tensor, TensorMeta, iterate_state, meta_of, read_headers, read_state
from syncd.client.wait import T
from syncd.errors import CorruptDataError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING
from syncd.protocol.manifest import Manifest
from syncd.protocol.version import Version

_ATTEMPTS = 8


class States(Following):
    """Reading the published weights."""

    @public
    def get_model_state_dict(self) -> tuple[Mapping[str, Tensor] | str | None, int]:
        """Return the published weights and their step, every byte checked against the manifest.

        Returns:
            The tensors by name, a URI for kind remote, or None with 0 before the first version.

        Raises:
            CorruptDataError: The step is damaged.
            UsageError: It is a step that others wrote, or a delta: an engine loads these by their path.
        """
        version = self._newest()
        if version is None:
            return None, 0
        if version.kind == "remote":
            return version.path, version.step
        return self._read(lambda leased: (self._load(leased), leased.version.step))

    @public
    def get_state_dict_meta(self) -> list[TensorMeta]:
        """Return name, dtype and shape of each published tensor; none before the first version."""
        version = self._newest()
        if version is None or version.kind == "remote":
            return []
        return self._read(lambda leased: meta_of(read_headers(self.job.disk, *self._place(leased))))

    def get_model_state_dict_iterator(self) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the published weights tensor by tensor; the step stays leased until this is done or closed.

        All is checked against the manifest before the first tensor comes.
        """
        self.check()
        with reported(self.job.root):
            version = self._newest()
        if version is None or version.kind == "remote":
            return
        with self._reading(version) as leased:
            yield from iterate_state(self.job.disk, *self._place(leased))

    def _load(self, leased: Leased) -> Mapping[str, Tensor]:
        return read_state(self.job.disk, *self._place(leased))

    def _read(self, work: Callable[[Leased], T]) -> T:
        """Read the newest version; when it goes while it is read, there is a newer one, and that is read."""
        failed: Version | None = None
        for _ in range(_ATTEMPTS):
            version = self._newest()
            assert version is not None
            try:
                with self._reading(version) as leased:
                    return work(leased)
            except (*MISSING, CorruptDataError, TryAgainError):
                if failed is not None and failed.pair == version.pair:
                    raise
                failed = version
        raise TryAgainError("versions go faster than they can be read", path=self.job.root)

    @contextlib.contextmanager
    def _reading(self, version: Version) -> Iterator[Leased]:
        if self._member is not None:
            with self.lease(version) as leased:
                yield leased
        else:
            yield self._examined(version)

    def _place(self, leased: Leased) -> tuple[str, Manifest]:
        manifest = leased.manifest
        if manifest is None or leased.version.layout != NATIVE or manifest.kind == "delta":
            what = "a delta" if manifest is not None else f"of layout {leased.version.layout}"
            hint = "let an engine load get_latest_model_path()"
            raise UsageError(f"step {leased.version.step} is {what}", hint=hint)
        return self.job.step(leased.version.step), manifest
