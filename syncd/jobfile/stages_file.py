"""`JOB/stages.json`: the progress of the stages of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncd.errors import CorruptDataError, storage_error
from syncd.protocol.documents import parse_json
from syncd.protocol.local_disk import LocalDisk

STAGES = "stages.json"


@dataclass(frozen=True, slots=True)
class StagesRecord:
    done: tuple[str, ...] = ()  # stages that have finished, in order
    models: Mapping[str, str] = field(default_factory=dict)  # the model that each started stage started from


def read_record(directory: str) -> StagesRecord:
    """Return the progress of earlier runs, an empty record before the first."""
    path = f"{directory}/{STAGES}"
    try:
        document = parse_json(LocalDisk().read(path))
        return StagesRecord(tuple(map(str, document["done"])), dict(document["models"]))
    except FileNotFoundError:
        return StagesRecord()
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        hint = f"move it away: stages then start again from what their directories hold: mv {path} {path}.bad"
        raise CorruptDataError(f"not a record of stages ({error!r})", path=path, hint=hint) from error
