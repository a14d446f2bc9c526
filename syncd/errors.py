"""The error tree: each error says what happened, where, what to run next, and the exit code it ends with.

Exit codes follow sysexits where it has a code. docs/commands.md lists them, docs/troubleshooting.md says what to do:

====  ==========================================================
code  meaning
====  ==========================================================
0     done
1     a bug in syncd: please report it
2     usage
3     not ready: nothing published yet, or a step is not complete
4     timed out
5     another daemon leads this job, or another trainer trains it
65    corrupt data
69    the engine can run neither the new version nor the last good one
74    I/O
75    try again: a passing state, nothing was changed
77    something is too open: `syncd doctor --security`
78    bad configuration
====  ==========================================================
"""

import contextlib
import os
from collections.abc import Iterator
from typing import ClassVar

from syncd._version import __version__

REPOSITORY = "https://github.com/syncd-project/syncd"
"""The address of the project. It is in setup.cfg and mkdocs.yml too, and a test compares them."""

DOCS = f"{REPOSITORY}/blob/{'main' if 'dev' in __version__ else f'v{__version__}'}/docs"
"""The documentation of this release, without a slash at the end: messages and `--help` link to its pages.

A release has its tag's pages, a version between releases those of the branch main.
"""

TROUBLESHOOTING = f"{DOCS}/troubleshooting.md"
"""The page that has an entry for each state, alert and exit code, and for frequent errors."""


class SyncdError(Exception):
    """Anything a user can meet. `str()` gives one line: what, and where.

    Args:
        message: What happened, in one sentence without a full stop.
        path: The file or directory concerned, if any.
        hint: A command to run, or what to change.
    """

    code: ClassVar[str] = "bug"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, path: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else str(path)
        self.hint = hint

    def __str__(self) -> str:
        where = f": {plain(self.path)}" if self.path else ""
        return f"{self.message}{where}"


def plain(text: str, keep: str = "") -> str:
    """Return a text that others wrote, with what could steer a terminal or is no text spelt out.

    Args:
        keep: Characters that stay although they do not print, such as the line feed.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text
    )


class UsageError(SyncdError):
    """The command or call cannot mean anything: wrong arguments, or a step that exists already."""

    code = "usage"
    exit_code = 2


class AlreadySealedError(UsageError):
    """Another save has sealed the step: what is sealed never changes, so this save ends without a step."""

    code = "already_sealed"


class NotReadyError(SyncdError):
    """Nothing has been published yet, or what there is is older than asked."""

    code = "not_ready"
    exit_code = 3


class TimedOutError(SyncdError):
    """A bounded wait ended before its condition held."""

    code = "timed_out"
    exit_code = 4


class LockHeldError(SyncdError):
    """Another daemon leads this job, or another trainer trains it."""

    code = "lock_held"
    exit_code = 5


class CorruptDataError(SyncdError):
    """Bytes on disk are not what they must be; nothing was changed."""

    code = "corrupt"
    exit_code = 65


class NonFiniteError(CorruptDataError):
    """A tensor holds NaN or infinity."""

    code = "non_finite"


class StorageError(SyncdError):
    """The file system refused an operation, or the job directory is not there."""

    code = "io"
    exit_code = 74
    errno: int | None = None
    """The operating system's number of the error, where there is one."""


class JobMissingError(StorageError):
    """The job directory is missing or unmounted: an error state, never an empty job."""

    code = "job_missing"


class JobReplacedError(JobMissingError):
    """Another directory is in the place of the job directory."""

    code = "job_replaced"


class StuckError(StorageError):
    """An operation stands in the kernel: the file system does not answer."""

    code = "stuck"


class TryAgainError(SyncdError):
    """A passing state; the same command may succeed later."""

    code = "try_again"
    exit_code = 75


class FencedError(TryAgainError):
    """A newer leader has taken over; this one may no longer publish or delete."""

    code = "fenced"


class SaveLostError(TryAgainError):
    """The directory of a save was removed while its writer was paused; nothing sealed was changed."""

    code = "save_lost"


class TermLostError(FencedError):
    """Somebody has removed the directory of this leader's term; it must stand for leadership again."""

    code = "term_lost"


class TooOpenError(SyncdError):
    """Others may do more with a job than they should: what `syncd doctor --security` ends with."""

    code = "too_open"
    exit_code = 77


class ConfigError(SyncdError):
    """The configuration is not usable."""

    code = "config"
    exit_code = 78


class ProtocolTooNewError(ConfigError, CorruptDataError):
    """A document was written by a newer major version of the protocol.

    Whoever reads many documents takes it for one that cannot be read, and continues without it; what was asked for
    by itself, such as the version file, is refused with 78.
    """

    code = "protocol_too_new"


def unexpected(error: Exception, program: str = "syncd", hint: str | None = None) -> SyncdError:
    """Return an error that nobody thought of as one that says so and where it came up; one of this tree as it is.

    Args:
        error: What was raised.
        program: Whose bug it is.
        hint: A command to run; where to report it unless given.
    """
    if isinstance(error, SyncdError):
        return error
    where = "".join(f" ({call})" for call in calls_of(error)[-1:])
    message = f"a bug in {program} {__version__}: {type(error).__name__}: {error}{where}"
    reported = SyncdError(message, hint=hint or f"report this line: {REPOSITORY}/issues")
    reported.__cause__ = error
    return reported


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, the name of its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def calls_of(error: BaseException | None) -> list[str]:
    """Return where an error came up: file, line and function of each call, the innermost last."""
    calls = list[str]()
    frame = error.__traceback__ if error else None
    while frame is not None:
        code = frame.tb_frame.f_code
        calls.append(f"{os.path.basename(code.co_filename)}:{frame.tb_lineno} {code.co_name}")
        frame = frame.tb_next
    return calls


def storage_error(error: OSError, path: object) -> StorageError:
    """Return the error of this tree for one of the operating system at a path."""
    reported = StorageError(error.strerror or str(error), path=error.filename or path)
    reported.errno = error.errno
    return reported


@contextlib.contextmanager
def storage_errors(path: object) -> Iterator[None]:
    """Raise an error of the operating system as one of this tree, at a path unless it names another."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


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
