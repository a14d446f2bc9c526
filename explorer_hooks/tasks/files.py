"""Tasks of one file: JSONL, a JSON object a line, or Parquet."""

from collections.abc import Iterator
from typing import Any

from explorer_hooks.tasks.task import Columns, ReadTasks, Task, from_json, plain, task_of
from syncd.errors import ConfigError, StorageError, first_line
from syncd.jobfile.task_sets import TaskSetSection
from syncd.protocol.digest import hasher

MAX_LINE = 1 << 22  # bytes of one line at most

PARQUET = ".parquet"

_ROWS = 1024  # rows that are read from Parquet at once

_BLOCK = 1 << 20


def read_jsonl(path: str, section: TaskSetSection) -> ReadTasks:
    """Return the tasks of a JSONL file; empty lines are skipped."""
    digest, columns = hasher(), Columns.of(section)
    made = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                digest.update(line)
                if line.strip():
                    made.append(_task(line, f"{path}:{number}", number, columns))
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise StorageError(error.strerror or str(error), path=path) from error
    return ReadTasks(f"{digest.hexdigest()}", tuple(made))


def read_parquet(path: str, section: TaskSetSection) -> ReadTasks:
    from pyarrow import ArrowException  # noqa: PLC0415 - who reads JSONL need not wait for it

    try:
        return ReadTasks(_digest_of(path), tuple(_parquet_tasks(path, Columns.of(section))))
    except FileNotFoundError:
        raise _missing(path) from None
    except (ArrowException, LookupError, OSError, ValueError) as error:
        # Arrow says of damage OSError, without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(error.strerror or str(error), path=path) from error
        raise ConfigError(f"cannot be read as Parquet: {first_line(error)}", path=path) from error


def _parquet_tasks(path: str, columns: Columns) -> Iterator[Task]:
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - as above

    with ParquetFile(path) as file:
        columns.check(file.schema_arrow.names, path)
        number = 0
        for batch in file.iter_batches(_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield task_of(plain(row), f"{path}, row {number}", f"row-{number}", columns)


def _task(line: bytes, where: str, number: int, columns: Columns) -> Task:
    if len(line) > MAX_LINE:
        raise ConfigError(f"a task of more than {MAX_LINE} bytes", path=where)
    try:
        row: Any = from_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", path=where) from None
    if not isinstance(row, dict):
        raise ConfigError("a task is a JSON object", path=where)
    return task_of(row, where, f"line-{number}", columns)


def _digest_of(path: str) -> str:
    digest = hasher()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return str(digest.hexdigest())


def _missing(path: str) -> ConfigError:
    hint = "explorer.tasks, or the source of a task set, names a JSONL or Parquet file, a directory, or a data set"
    return ConfigError("the file of tasks is missing", path=path, hint=hint)
