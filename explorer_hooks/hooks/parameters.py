"""The parameters of a model of this process, filled with versions from whole files or from changes."""

from collections.abc import Mapping

import torch

from syncd.errors import LoadFailedError, RefusedError
from syncd.protocol.local_disk import SystemClock
from syncd.transports.base import WeightDirectory
from syncd.transports.delta.fill_changes import ParameterVersion
from syncd.transports.files import fill_tensors
from syncd.transports.files.fill_tensors import LoadCounts, check_fit, offered
from syncd.transports.files.leased_directory import LoadTimings
from syncd.transports.tensors import Fit, TensorMeta
from syncd.transports.torch_tensors import TargetTensors, is_straight, target_tensors


class ModelParameters:
    """Fills tensors with versions, and knows which version they hold.

    Whoever fills them makes sure that nobody uses them meanwhile, and that nobody else changes them.

    Args:
        tensors: The tensors by the names that versions have for them: `model.state_dict(keep_vars=True)`.
        direct: Whether files that are not in the page cache are read past it. Set it to false if several processes
            of a host load the same files without a stage.
        cast: Whether a version may have other floating-point dtypes than the tensors.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, direct: bool = True, cast: bool = True
    ) -> None:
        self.tensors = tensors
        self.loaded: LoadCounts | None = None  # what the last load did
        self.label: str | None = None
        """The label of the version that was loaded last, None if none was, or if they hold something else."""
        self._timings = LoadTimings(SystemClock())
        self._direct, self._cast = direct, cast
        held = self._targets().metas
        self._at_first = None if cast else held
        self._holds: Mapping[str, TensorMeta] | None = self._at_first
        self._whole: WeightDirectory | None = None
        """The version that was filled from whole files last, None if they hold something else."""
        self._changed: ParameterVersion | None = None
        """What fills versions that are stored as changes; None before the first one after a whole one."""

    @property
    def metas(self) -> Mapping[str, TensorMeta] | None:
        """Return the tensors of the version that was loaded; None after a failed load.

        Before the first load they are those of the model itself, None if versions may be cast.
        """
        return self._holds

    @property
    def seconds(self) -> float | None:
        """Return what it took to read the last version, to make it of changes and to fill the tensors."""
        return sum(self._timings.values()) if self.label is not None else None

    def prepare(self, target: WeightDirectory) -> None:
        """Refuse a version that does not fit; one that is stored as changes is made and proved, not written."""
        targets = self._targets()
        self._timings.clear()
        with self._timings.part("prepare"):
            fit = check_fit(target, targets, cast=self._cast)
            if target.changes is not None:
                self._changed = self._changed or ParameterVersion(self._whole)
                self._changed.prepare(target, targets, fit)

    def load(self, target: WeightDirectory) -> None:
        self.label = self._holds = None
        try:
            fit = check_fit(target, self._targets(), cast=self._cast)
        except RefusedError as error:  # `prepare` did not refuse it, so this is a failed load
            raise LoadFailedError(error.message, path=error.path) from error
        with self._timings.part("load"):
            self.loaded = self._fill(target, fit)
        self._holds, self.label = offered(target), target.label

    def _fill(self, target: WeightDirectory, fit: Fit) -> LoadCounts:
        changed, targets = self._changed, self._targets()
        self._whole = self._changed = None  # while they are filled, they hold no version
        if target.changes is None:
            counts = fill_tensors.load(target, targets, fit, direct=self._direct)
            self._whole = target
        else:
            changed = changed or ParameterVersion()
            counts = changed.load(target, targets, fit, direct=self._direct)
            self._changed = changed
        return counts

    def forget(self) -> None:
        """Forget which version they hold: somebody else has filled them."""
        self.label = self._whole = self._changed = None

    def restart(self) -> None:
        """Forget all loads: the tensors have the values of the start again, whose dtypes bind no version."""
        self.forget()
        self._holds = self._at_first

    def takes_changes(self) -> bool:
        """Return whether they are in main memory, and of the dtypes of the version that was loaded."""
        targets = self._targets()
        metas = {**targets.metas, **(self._holds or {})}
        return all(is_straight(tensor, metas[name].dtype) for name, tensor in targets.tensors.items())

    def _targets(self) -> TargetTensors:
        """Return what a load fills: a broadcast may have moved the tensors since the last one."""
        return target_tensors(self.tensors)
