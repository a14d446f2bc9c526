"""What really happened: each byte that the trainer wrote, and which attempts count."""

from simulator.tree import Directory, File, Tree, split

JOB = "/job"
STATE = "/job/.syncd"
AWAY = "/job/.syncd.away"
"""Where the state directory is moved to by who moves it away."""

Attempt = tuple[int, str]
"""(step, attempt)."""


class Record:
    """The truth about one trainer's writes.

    Args:
        tree: The server.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.contents: dict[Attempt, dict[str, bytes]] = {}
        """The shard files that each attempt stands for."""
        self._stored: dict[Attempt, dict[str, bytes]] = {}
        self.abandoned: dict[Attempt, float] = {}
        self.announced: Attempt | None = None
        self.announced_at = float("-inf")

    def writing(self, attempt: Attempt, name: str, data: bytes) -> None:
        """Take note of a shard file of which a writer is about to write the bytes, or the changes."""
        self.contents.setdefault(attempt, {})[name] = data

    def storing(self, attempt: Attempt, files: dict[str, bytes]) -> None:
        """Take note of the files that a writer is about to write."""
        self._stored.setdefault(attempt, {}).update(files)

    def announce(self, attempt: Attempt, now: float) -> None:
        """Take note that the marker names an attempt."""
        self.announced, self.announced_at = attempt, now

    def resume(self, step: int, now: float) -> int:
        """Take note that the trainer is gone back to a step; return how many attempts that abandons."""
        left = [attempt for attempt in self.contents if attempt[0] > step and attempt not in self.abandoned]
        self.abandoned.update(dict.fromkeys(left, now))
        return len(left)

    def forget_job(self, now: float) -> None:
        """Take note that the job is another one from now on: nothing of the old one counts."""
        self.resume(-1, now)
        self.announced, self.announced_at = None, float("-inf")

    def plant(self, path: str, data: bytes) -> None:
        """Write a file in place, as programs do that do not follow the protocol."""
        *above, name = split(path)
        directory = self._tree.find("/" + "/".join(above))
        if not isinstance(directory, Directory):
            return
        node = directory.children.get(name) or self._tree.create(directory, name)
        if isinstance(node, File):
            self._tree.write(node, data)
            node.durable = data

    def is_intact(self, step_directory: Directory, attempt: Attempt) -> bool:
        """Say whether a step's directory holds exactly the files of an attempt."""
        written = self._stored.get(attempt)
        return written is not None and all(
            _content(step_directory, name) == data for name, data in written.items()
        )


def _content(directory: Directory, name: str) -> bytes | None:
    node: Directory | File | None = directory
    for part in name.split("/"):
        node = node.children.get(part) if isinstance(node, Directory) else None
    return node.data if isinstance(node, File) else None
