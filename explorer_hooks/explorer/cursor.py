"""How far an explorer's tasks are done: one small file, and with it each group is written once.

Before a batch is written the file says both places: where the tasks stand without the batch, and where they stand
once the batch is visible, with its number. Numbers of batches are never used again, so a restart sees from the
next free one whether the batch came out, and goes on from the right place whenever the process was killed.
"""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from explorer_hooks.explorer import places
from syncd.errors import ConfigError
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import Document, Fields, encode, read_document


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order of tasks.

    Args:
        epoch: The epoch, from 0.
        position: The place in its order of the task that comes next.
        batches: Batches written before this place.
    """

    epoch: int = 0
    position: int = 0
    batches: int = 0

    def behind(self, epoch: int, position: int, *, batch: bool) -> "Cursor":
        """Return the place behind a task, one batch later where there is one."""
        return Cursor(epoch, position + 1, self.batches + batch)


@dataclass(frozen=True, slots=True)
class State:
    """What the file says.

    Args:
        run: Makes the ids of groups unlike those of any other run of this identity.
        tasks: The digest of the tasks.
        seed: Of their order.
        cursor: The place, as long as batch `pending` is not there.
        pending: The number of the batch that is being written, 0 for none.
        then: The place once that batch is there.
    """

    run: str
    tasks: str
    seed: str
    cursor: Cursor = Cursor()
    pending: int = 0
    then: Cursor = Cursor()

    def settled(self, upcoming: int) -> "State":
        """Return the state of a restart, whose next batch would have this number."""
        if 0 < self.pending < upcoming:
            return replace(self, cursor=self.then, pending=0)
        return replace(self, pending=0)


class Ledger:
    """Writes batches together with the place that they lead to.

    Args:
        writer: Where batches go.
        state: What the file says; `opened` reads it.
    """

    def __init__(self, writer: ExperienceWriter, state: State) -> None:
        self.writer, self.state = writer, state
        self._path = places.state(writer.job, writer.explorer)

    @classmethod
    def opened(cls, writer: ExperienceWriter, tasks: str, seed: str) -> "Ledger":
        """Return the ledger of an explorer, at the place where an earlier process of its identity left it.

        Raises:
            ConfigError: The tasks or their order are others than those that the place is in.
            CorruptDataError: The file is damaged.
        """
        path = places.state(writer.job, writer.explorer)
        try:
            state = _state(read_document(writer.job.disk, path)).settled(writer.upcoming)
        except MISSING:
            state = State(uuid.uuid4().hex[:8], tasks, seed)
        if (state.tasks, state.seed) != (tasks, seed):
            what = "the tasks have changed" if state.tasks != tasks else "the order of the tasks has changed"
            raise ConfigError(
                f"{what} since explorer {writer.explorer} began",
                path=path,
                hint=f"give another --name, or begin anew: rm {path}",
            )
        return cls(writer, state)

    @property
    def cursor(self) -> Cursor:
        """Return the place of the task that comes next."""
        return self.state.cursor

    def group(self, epoch: int, position: int) -> str:
        """Return the id of the group of a task, which no other group of the job has."""
        return f"{self.writer.explorer}-{self.state.run}/{epoch}.{position}"

    def write(self, experiences: Sequence[Experience], then: Cursor) -> str:
        """Write a batch durably and move on; return its path.

        Raises:
            FencedError: A later process writes under this identity.
            StorageError: It could not be written.
        """
        self._keep(replace(self.state, pending=self.writer.upcoming, then=then))
        path = self.writer.write(experiences)
        self.state = replace(self.state, cursor=then)
        return path

    def move(self, cursor: Cursor) -> None:
        """Move on without a batch: nothing of these tasks could be used.

        Raises:
            FencedError: A later process writes under this identity.
            StorageError: It could not be written.
        """
        moved = replace(self.state, cursor=cursor)
        self._keep(moved)
        self.state = moved

    def _keep(self, state: State) -> None:
        self.writer.replace(self._path, encode(_document(state)))


def _document(state: State) -> Document:
    return {**asdict(state), "cursor": asdict(state.cursor), "then": asdict(state.then)}


def _state(fields: Fields) -> State:
    return State(
        run=fields.text("run"),
        tasks=fields.text("tasks"),
        seed=fields.text("seed"),
        cursor=_cursor(fields.record("cursor")),
        pending=fields.integer("pending"),
        then=_cursor(fields.record("then")),
    )


def _cursor(fields: Fields) -> Cursor:
    return Cursor(fields.integer("epoch"), fields.integer("position"), fields.integer("batches"))
