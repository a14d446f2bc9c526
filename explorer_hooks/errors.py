"""What can go wrong between a follower and its engine. The rest is `syncd.errors`."""

from syncd.errors import CorruptDataError, SyncdError, TryAgainError


class RefusedError(CorruptDataError):
    """A version does not fit the engine, or is not what its manifest says; the engine was not touched."""

    code = "refused"


class EngineUnreachableError(TryAgainError):
    """The engine does not answer: it is starting, restarting or gone."""

    code = "engine_unreachable"


class LoadFailedError(SyncdError):
    """The engine said no, or said yes and runs something else; it may be half loaded until `abort`."""

    code = "load_failed"
    exit_code = 74


class EngineDeadError(SyncdError):
    """The engine can neither load the new version nor go back to the last good one: restart it."""

    code = "engine_dead"
    exit_code = 69
