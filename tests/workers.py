"""How pytest-xdist's workers share the tests: what belongs to one group runs in one worker, one after the other.

Its own --dist loadgroup does not work with pytest 9.2: the scheduler gets ids without the group's name. So the
groups are told by the tests' ids here.
"""

import re

from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    # A namespace of mounts keeps a file system alive whose power is cut meanwhile.
    "mounts": r"test_powercut\.py::|::test_a_job_on_a_read_only_mount|::test_full_file_system|::test_s(run|lurm)"
    r"|test_slurm_files\.py::|test_(mount_trouble|mount_verbs|memory_transport|soak_parts)\.py::"
    r"|test_(loop_|sweep_)?full_disk\.py::",
    # One boot serves all of these.
    "systemd": r"test_systemd\.py::",
    # What ranks of an engine found serves all of these, and starting them takes longer than anything else.
    "engines": r"tests/trainer/engines/",
    # They are forked from one process that has imported torch.
    "forked": r"tests/explorer/test_(matrix|examples|sync_benchmark)\.py::",
    # One undisturbed run is what all of them are compared with.
    "kills": r"test_kills\.py::",
    "export of FSDP": r"test_export_fsdp\.py::",
    # One boot of a bed serves all tests of its version; more machines at a time than two only wait for each other.
    "NFS v4.2": r"::.*nfs.*\[vers=4\.2|test_nfs\.py::.*\[v4\.2|test_nfs_(dead_server|machines)\.py::",
    "NFS v3": r"::.*nfs.*\[vers=3|test_nfs\.py::.*\[v3",
}


def group_of(test: str) -> str:
    """Return the name of the group of a test; most are alone in one of their own."""
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, test)), test)


class Scheduling(LoadScopeScheduling):
    """Groups first, then the tests alone, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
