"""Who may read and write what is made in a job: by policy, whatever the umask, by everything that makes files."""

import os
import stat

import pytest
from support.jobs import write_step

from syncd import jsonl
from syncd.cli.options import read_config, with_policy
from syncd.errors import ConfigError
from syncd.observe.events import Event
from syncd.observe.journal import Journal
from syncd.protocol.layout import Job, job_disk
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.permissions import PRIVATE, UMASK, Modes, modes_of
from syncd.protocol.presence import Presence, Publisher
from syncd.protocol.request import Pin, write_pin
from syncd.synchronizer import Synchronizer

GROUP = os.getegid()
OTHER = next((group for group in os.getgroups() if group != GROUP), 12345 if os.geteuid() == 0 else GROUP)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def modes_below(root):
    """Return the modes and groups of all files and of all directories below a job, its configuration apart."""
    files, directories = set(), set()
    for parent, names, others in os.walk(root):
        for name in (*names, *others):
            found = os.lstat(f"{parent}/{name}")
            if name != "config.toml":
                kind = directories if stat.S_ISDIR(found.st_mode) else files
                kind.add((stat.S_IMODE(found.st_mode), found.st_gid))
    return files, directories


def fill(root):
    """Have everything that makes files in a job make some."""
    job = Job.at(str(root))
    write_step(job, 1, full=True)
    write_pin(job, Pin(1))
    publisher = Publisher(job.disk, SystemClock(), job.explorers, Presence("e0"))
    publisher.prepare()
    publisher.update()
    with Synchronizer.open(job.root, "trainer"):
        pass
    journal = Journal(job.events, adopt=job.disk.adopt)
    journal.observe(Event("leadership_acquired", "info", 0.0, {}))
    jsonl.append(f"{job.root}/metrics.jsonl", [{"a": 1}], job.disk.adopt)


def test_the_private_policy_applies_under_any_umask(root, umask):
    (root / "config.toml").write_text('[job]\npermissions = "private"\n')
    fill(root)
    assert modes_below(root) == ({(0o600, GROUP)}, {(0o700, GROUP)})


def test_the_group_policy_applies_under_any_umask(root, umask):
    (root / "config.toml").write_text(f'[job]\npermissions = "group"\ngroup = "{OTHER}"\n')
    fill(root)
    assert modes_below(root) == ({(0o660, OTHER)}, {(0o2770, OTHER)})


def test_without_a_policy_the_umask_decides(root, umask):
    fill(root)
    assert modes_below(root) == ({(0o644 & ~umask, GROUP)}, {(0o777 & ~umask, GROUP)})


def test_a_secret_is_private_under_each_policy(root, umask):
    disk = job_disk(str(root), f"{root}/.syncd", modes_of("group", str(OTHER)))
    disk.replace(f"{root}/offer.json", b"secret", private=True)
    assert stat.S_IMODE(os.stat(root / "offer.json").st_mode) == 0o600


def test_an_existing_directory_gets_the_mode_of_the_policy(root):
    os.mkdir(root / "state", 0o755)
    job_disk(str(root), f"{root}/.syncd", PRIVATE).make_directory(f"{root}/state")
    assert stat.S_IMODE(os.stat(root / "state").st_mode) == 0o700


def test_a_forbidden_setgid_bit_is_omitted(root, monkeypatch):
    real = os.chmod

    def forbids(place, mode):
        if mode & stat.S_ISGID:
            raise PermissionError
        real(place, mode)

    monkeypatch.setattr(os, "chmod", forbids)
    job_disk(str(root), f"{root}/.syncd", Modes(0o660, 0o2770, OTHER, exact=True)).make_directory(f"{root}/a")
    found = os.stat(root / "a")
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o770, OTHER)


def test_a_policy_written_later_is_applied(root):
    job = Job.at(str(root))
    job.disk.replace(f"{root}/before", b"")
    (root / "config.toml").write_text('[job]\npermissions = "private"\n')
    job.disk.replace(f"{root}/after", b"")
    assert [stat.S_IMODE(os.stat(root / name).st_mode) & 0o077 for name in ("before", "after")] != [0, 0]
    assert stat.S_IMODE(os.stat(root / "after").st_mode) == 0o600


def test_the_daemon_table_takes_precedence_over_the_job_table(root):
    text = '[job]\npermissions = "umask"\n[daemon]\npermissions = "private"\n'
    (root / "config.toml").write_text(text)
    Job.at(str(root)).disk.replace(f"{root}/file", b"")
    assert stat.S_IMODE(os.stat(root / "file").st_mode) == 0o600
    assert read_config(Job.at(str(root)), {}).permissions == "private"


def test_the_daemon_falls_back_to_the_policy_of_the_job_table(root):
    (root / "config.toml").write_text('[job]\npermissions = "private"\n')
    before = os.umask(0o022)
    try:
        job = Job.at(str(root))
        job = with_policy(job, read_config(job, {}))
        assert os.umask(0o022) == 0o077
    finally:
        os.umask(before)
    job.disk.make_directory(f"{root}/directory")
    assert stat.S_IMODE(os.stat(root / "directory").st_mode) == 0o700


@pytest.mark.parametrize(
    ("permissions", "group", "said"),
    [
        ("open", "", "not one of"),
        ("group", "", "needs a group"),
        ("private", "users", "contradict"),
        ("umask", "users", "contradict"),
        ("group", "no-such-group", "no group"),
        ("group", "4294967295", "no group"),
    ],
)
def test_an_invalid_policy_is_refused_with_the_path(root, permissions, group, said):
    with pytest.raises(ConfigError, match=said):
        modes_of(permissions, group)
    (root / "config.toml").write_text(f'[job]\npermissions = "{permissions}"\ngroup = "{group}"\n')
    with pytest.raises(ConfigError, match=said) as raised:
        Job.at(str(root)).disk.replace(f"{root}/file", b"")
    assert raised.value.path == f"{root}/config.toml"
    assert not (root / "file").exists()


def test_listing_works_with_an_unreadable_policy(root):
    (root / "config.toml").write_text("not = [toml")
    assert LocalDisk().list(str(root))
    assert Job.at(str(root)).disk.list(str(root))


def test_policies_are_found_by_name():
    assert modes_of("umask") == UMASK
    assert modes_of("private") == PRIVATE
