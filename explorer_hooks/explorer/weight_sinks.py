"""Who takes in what a broadcast has brought: the model of this process, or a server."""

from abc import ABC, abstractmethod

import structlog

from explorer_hooks.explorer.http_receiver import ServedReceiver
from explorer_hooks.follower.follower import Follower
from explorer_hooks.hooks.http_engine import HttpEngineHook, UntouchedError
from explorer_hooks.hooks.transformers import TransformersHook
from syncd.errors import SyncdError
from syncd.protocol.version import unpublished_label
from syncd.transports.broadcast.receive import Received, Receiver

_LOG = structlog.get_logger()


class Taker(ABC):
    """Takes weights in. Used by one thread."""

    receiver: Receiver
    """Where they come from."""

    @abstractmethod
    def take(self, received: Received) -> None:
        """Have the engine run what was received, and say in the presence that it does.

        Raises:
            SyncdError: It does not; the engine is on what it ran, or gets no work until files are loaded.
        """

    @abstractmethod
    def own(self, label: str) -> None:
        """Note that what was taken is published; its files have been given this label."""

    @abstractmethod
    def disown(self) -> None:
        """Note that what was taken never will be: the engine is said to run no version."""


class IntoModel(Taker):
    """The model of this process.

    Args:
        receiver: Has its parameters.
        hook: Keeps it from generating meanwhile.
    """

    def __init__(self, receiver: Receiver, hook: TransformersHook) -> None:
        self.receiver, self._hook = receiver, hook

    def take(self, received: Received) -> None:
        """Copy what was received into the parameters, between two generations."""
        self._hook.load_tensors(label_ahead(received), lambda: self.receiver.load(received))

    def own(self, label: str) -> None:
        """Have the model called what all others call it."""
        self._hook.set_label(label)

    def disown(self) -> None:
        """Say that nobody can name what the model is."""
        self._hook.drop_label()


class IntoServer(Taker):
    """A server.

    Args:
        receiver: Has room for what comes.
        hook: Drives the server.
        follower: Brings it back.
    """

    def __init__(self, receiver: ServedReceiver, hook: HttpEngineHook, follower: Follower) -> None:
        self.receiver, self._hook, self._follower = receiver, hook, follower

    def take(self, received: Received) -> None:
        """Hand what was received to the server; one that is left in pieces is brought back at once."""
        try:
            self._hook.load_tensors(label_ahead(received), received.tensors)
        except UntouchedError:
            raise
        except SyncdError:
            self._follower.recover()
            raise
        self.receiver.tell(received)

    def own(self, label: str) -> None:
        """Have the server say what it runs as all others do."""
        try:
            self._hook.set_label(label)
        except SyncdError as error:
            # This process knows it in any case; another one loads the files, which are the same.
            _LOG.warning("version_report_failed", reason=str(error))

    def disown(self) -> None:
        """Forget what the server calls what it has taken."""
        self._hook.drop_label()


def label_ahead(received: Received) -> str:
    """Return the label of what was received until it is published: the attempt stands for its content."""
    return unpublished_label(received.round.pair, received.round.attempt)
