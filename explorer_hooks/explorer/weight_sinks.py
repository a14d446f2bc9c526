"""Where weights from a transport go: into the model of this process, or into a server."""

from abc import ABC, abstractmethod

import structlog

from explorer_hooks.follower.follower import Follower
from explorer_hooks.hooks.http_engine import HttpEngineHook, UntouchedError
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.errors import SyncdError
from syncd.transports.base import EarlyReceiver, WeightTensors

_LOG = structlog.get_logger()


class WeightSink(ABC):
    """Loads received weights into an engine. Used by one thread.

    Args:
        receiver: Where the weights come from.
    """

    def __init__(self, receiver: EarlyReceiver) -> None:
        self.receiver = receiver

    @abstractmethod
    def load(self, weights: WeightTensors) -> None:
        """Load what was received, and report in the presence that the engine runs it.

        Raises:
            SyncdError: It was not loaded; the engine runs what it ran before, or gets no work until files are loaded.
        """

    @abstractmethod
    def mark_published(self, label: str) -> None:
        """Rename what was loaded: it is published, and `label` names its files."""

    @abstractmethod
    def mark_void(self) -> None:
        """Forget the name of what was loaded: it will never be published, and the engine runs no version."""


class ModelSink(WeightSink):
    """The model of this process.

    Args:
        receiver: Has the model's parameters.
        hook: Keeps the model from generating during the load.
    """

    def __init__(self, receiver: EarlyReceiver, hook: TransformersHook) -> None:
        super().__init__(receiver)
        self._hook = hook

    def load(self, weights: WeightTensors) -> None:
        """Copy what was received into the parameters, between two generations."""
        self._hook.load_tensors(weights.label, lambda: self.receiver.load(weights))

    def mark_published(self, label: str) -> None:
        """Rename the model's version."""
        self._hook.set_label(label)

    def mark_void(self) -> None:
        """Name the model's version unknown."""
        self._hook.drop_label()


class ServerSink(WeightSink):
    """A server.

    Args:
        receiver: Receives into its own memory.
        hook: Drives the server.
        follower: Brings the server back after a failure.
    """

    def __init__(self, receiver: EarlyReceiver, hook: HttpEngineHook, follower: Follower) -> None:
        super().__init__(receiver)
        self._hook, self._follower = hook, follower

    def load(self, weights: WeightTensors) -> None:
        """Push what was received to the server; if the server is left half loaded, roll it back at once."""
        try:
            self._hook.load_tensors(weights.label, weights.tensors)
        except UntouchedError:
            raise
        except SyncdError:
            self._follower.recover()
            raise
        self.receiver.report_running(weights)

    def mark_published(self, label: str) -> None:
        """Tell the server the label of the files."""
        try:
            self._hook.set_label(label)
        except SyncdError as error:
            # This process knows the version in any case; another process loads the files, which are the same.
            _LOG.warning("version_report_failed", reason=str(error))

    def mark_void(self) -> None:
        """Forget the server's name for what it loaded."""
        self._hook.drop_label()
