"""How pytest-xdist's workers share the tests: a group runs in one worker, one test after the other.

`@pytest.mark.group("name")` names the group of a test. Without one, the tests of a file that use a fixture of the
module are a group: what they share is made once, not once a worker. pytest-xdist's own `--dist loadgroup` does not
work with pytest 9.2 (its scheduler gets ids without the group's name), so each worker writes the groups that it has
collected into a file that the scheduler reads.
"""

import json
import os
import tempfile
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

FILE = "groups_file"
"""The key of `workerinput` that names the file."""


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test, None for a test that may run beside any other."""
    if marker := item.get_closest_marker("group"):
        return str(marker.args[0])
    return item.nodeid.partition("::")[0] if _shares(item) else None


def _shares(item: pytest.Item) -> bool:
    """Return whether a test uses what is made once for its module."""
    fixtures = item._fixtureinfo.name2fixturedefs
    return any(definitions[-1].scope in {"module", "class"} for definitions in fixtures.values())


def write_groups(path: str, items: Sequence[pytest.Item]) -> None:
    """Write the group of each test that has one, by the test's id."""
    groups = {item.nodeid: group for item in items if (group := group_of(item)) is not None}
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), delete=False) as file:
        json.dump(groups, file)
    os.replace(file.name, path)


class Scheduling(LoadScopeScheduling):
    """Gives a whole group to one worker."""

    _groups: dict[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._groups is None:
            with open(self.config.stash[GROUPS], encoding="utf-8") as file:
                self._groups = json.load(file)
        return self._groups.get(nodeid, nodeid)


GROUPS = pytest.StashKey[str]()
"""Where the controller keeps the path of the file."""
