"""The configuration that a job keeps, `JOB/config.toml`, as everything that makes files in the job reads it.

`permissions` and `group`, in `[daemon]` or else in `[job]`, say who may read and write what is made there. All
programs of a job read them at one place, so that they follow one policy.
"""

import os
from collections.abc import Mapping
from typing import Any

from syncd.errors import ConfigError, CorruptDataError
from syncd.protocol.disk import MISSING, LocalDisk
from syncd.protocol.modes import UMASK, Modes, modes_of

CONFIG = "config.toml"

LIMIT = 1 << 20
"""The largest configuration that is read, in bytes."""


def read_config_file(path: str) -> bytes:
    """Return the content of a configuration file, which may be a link to one that several jobs share.

    Raises:
        ConfigError: It is too large, or no regular file: reading a FIFO would never end.
        OSError: It cannot be read; a missing file stays `FileNotFoundError`.
    """
    try:
        return LocalDisk().read(os.path.realpath(path), LIMIT)
    except CorruptDataError as error:
        raise ConfigError(error.message, path=path, hint=f"ls -lL {path}") from error


def policy_in(document: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return `permissions` and `group` of a job's file: `[daemon]` counts before `[job]`.

    Raises:
        ConfigError: One is not text.
    """
    tables = [table for name in ("daemon", "job") if isinstance(table := document.get(name), dict)]
    given = next((table for table in tables if "permissions" in table), {})
    found = given.get("permissions", "umask"), given.get("group", "")
    if not all(isinstance(value, str) for value in found):
        raise ConfigError("permissions and group are text", path=path)
    return found


def modes_in(document: Mapping[str, Any], path: str) -> Modes:
    """Return what the policy in a job's file means here.

    Raises:
        ConfigError: It means nothing, or not for this user.
    """
    try:
        return modes_of(*policy_in(document, path))
    except ConfigError as error:
        error.path = path
        raise


def parse_config(data: bytes, path: str) -> dict[str, Any]:
    """Return a configuration file as a table.

    Raises:
        ConfigError: It is not TOML.
    """
    import tomllib  # noqa: PLC0415 - most commands read no configuration, and must be instant

    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", path=path, hint=f"less {path}") from error


class KeptModes:
    """What the policy in a job's `config.toml` means here. Where there is no file yet, it is looked for again.

    Args:
        root: The job directory.
    """

    def __init__(self, root: str) -> None:
        self._path = f"{root}/{CONFIG}"
        self._modes: Modes | None = None

    def __call__(self) -> Modes:
        """Return it.

        Raises:
            ConfigError: The file or its policy is not usable.
        """
        if self._modes is None:
            try:
                data = read_config_file(self._path)
            except MISSING:
                return UMASK
            self._modes = modes_in(parse_config(data, self._path), self._path)
        return self._modes
