"""A table of the job's file that another package adds."""

from syncd.jobfile.sections import Count, Section


class OwnSection(Section):
    """What an own part of explorers reads."""

    depth: Count = 3
    """How deep it goes."""
