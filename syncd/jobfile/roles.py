"""What a part's table in [explorer] asks for, as far as the core and other parts need to know.

They find such tables by their class, so none of them is named.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from syncd.jobfile.sections import Section


class RunnerSection(Section):
    """A table whose part explores in place of one response to each prompt."""

    @property
    def is_given(self) -> bool:
        """Return whether the file asks for it."""
        return False

    @property
    def has_own_tasks(self) -> bool:
        """Return whether it brings its tasks, so that the file names none."""
        return False

    @property
    def measured_as(self) -> Sequence[str]:
        """Return what tells figures of it from those of other runners, and of prompts."""
        return "", "", "agent"  # as prompts have been recorded from the beginning


class ReaderSection(Section):
    """A table whose part reads all that is sampled for training."""

    @property
    def is_given(self) -> bool:
        """Return whether the file asks for it."""
        return False


Role = TypeVar("Role", RunnerSection, ReaderSection)


def given_tables(explorer: Section, role: type[Role]) -> Mapping[str, Role]:
    return {name: table for name, table in explorer if isinstance(table, role) and table.is_given}


def runner_of(explorer: Section) -> RunnerSection:
    """Return the table of what explores; one that is not given if prompts are explored."""
    tables = [table for _, table in explorer if isinstance(table, RunnerSection)]
    return max(tables, key=lambda table: table.is_given, default=RunnerSection())
