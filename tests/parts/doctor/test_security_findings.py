"""What of a snapshot is too open: each rule finds its own and nothing else, in records and on a real job."""

import dataclasses
import json
import os
import stat
import struct

import pytest
from support.cli import Shell
from support.hostile import build, fingerprint

from syncd.parts.doctor.security_report import collect, examine, rights_in, secret_keys, service_settings
from syncd.parts.doctor.security_rules import (
    AccessSnapshot,
    AclEntry,
    PathAccess,
    SystemdUnit,
    judge,
    verdict,
)
from syncd.protocol.mount import Mount

ME, GROUP = 1000, 2000
DIRECTORY, FILE, LINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK
LOCAL = Mount("/", "ext4", ("rw",), "/dev/x")


def directory(role="job", mode=0o700, uid=ME, gid=ME, path="/shared/job", **more):
    return PathAccess(path, role, DIRECTORY | mode, uid, gid, **more)


def file(role="file", mode=0o600, uid=ME, gid=ME, path="/shared/job/.syncd/version.json", **more):
    return PathAccess(path, role, FILE | mode, uid, gid, **more)


def seen(*entries, **more):
    given = {"user": ME, "umask": 0o077, "mount": LOCAL, "permissions": "umask", **more}
    job = () if any(entry.role == "job" for entry in entries) else (directory(),)
    return AccessSnapshot("/shared/job", entries=(*job, *entries), **given)


def found(snapshot):
    """Return the findings as (name, severity), without what is only good to know."""
    return [(finding.name, finding.severity) for finding in judge(snapshot) if finding.severity != "info"]


IN_GROUP = {"permissions": "group", "unix_group": GROUP}
NFS = Mount("/shared", "nfs4", ("rw", "sec=sys"), "server:/x")


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (seen(directory("state"), file()), []),
        (seen(directory(mode=0o755), umask=0o022), [("world-readable", "warn")]),
        (seen(directory(mode=0o750)), []),
        (seen(directory(mode=0o702)), [("world-writable", "fail")]),
        (seen(directory("step", 0o757)), [("world-writable", "fail")]),
        (seen(file(mode=0o602)), [("world-writable", "fail")]),
        (seen(file(mode=0o660)), [("group-writable", "warn")]),
        (seen(file("config", 0o660)), [("group-writable", "fail")]),
        (seen(file("secret", 0o640)), [("readable-secret", "fail")]),
        (seen(file("secret", 0o604)), [("readable-secret", "fail")]),
        (seen(file("secret", 0o600)), []),
        (seen(file("secret", 0o600, uid=99)), [("owner", "warn")]),
        (seen(PathAccess("/shared/job/.syncd", "state", LINK | 0o777, ME, ME)), [("link", "fail")]),
        (seen(PathAccess("/shared/job/config.toml", "config", LINK | 0o777, ME, ME)), []),
        (seen(file("appended", links=2)), [("second-name", "fail")]),
        (seen(file("file", links=2)), []),
        (seen(directory("state", uid=99)), [("owner", "warn")]),
        (seen(directory("state", uid=99, gid=GROUP, mode=0o2770), directory(mode=0o2770, gid=GROUP), **IN_GROUP), []),
        (seen(directory("parent", 0o755, uid=0, gid=0, path="/shared")), []),
        (seen(directory("parent", 0o777, uid=0, gid=0, path="/shared")), [("world-writable", "fail")]),
        (seen(directory("parent", 0o1777, uid=0, gid=0, path="/tmp")), []),
        (seen(directory("parent", 0o1777, uid=0, gid=0, path="/tmp"), directory(uid=99, path="/tmp/job")), []),
        (seen(
            directory("parent", 0o1777, uid=0, gid=0, path="/tmp"),
            directory("parent", 0o755, uid=99, path="/tmp/theirs"), directory(path="/tmp/theirs/job"),
        ), [("world-writable", "fail"), ("owner", "warn")]),
        (seen(
            directory("parent", 0o1777, uid=0, gid=0, path="/"),
            directory("parent", 0o755, uid=99, path="/theirs"), directory(path="/theirs/job"),
        ), [("world-writable", "fail"), ("owner", "warn")]),
        (seen(directory("parent", 0o775, uid=0, gid=5, path="/shared")), [("group-writable", "warn")]),
        (seen(directory("parent", 0o755, uid=99, path="/shared")), [("owner", "warn")]),
        (seen(directory(mode=0o700), file(mode=0o640), permissions="private"), [("against-policy", "fail")]),
        (seen(directory(mode=0o2770, gid=GROUP), file(mode=0o660, gid=GROUP), **IN_GROUP), []),
        (seen(directory(mode=0o770, gid=GROUP), **IN_GROUP), [("no-setgid", "warn")]),
        (seen(directory(mode=0o2770, gid=7), **IN_GROUP), [("group-writable", "warn")]),
        (seen(directory(mode=0o2775, gid=GROUP), **IN_GROUP), [("against-policy", "fail")]),
        (seen(directory(rights=(AclEntry("user", 99, 6),))), [("acl", "fail")]),
        (seen(directory(rights=(AclEntry("user", 99, 4),))), []),
        (seen(file("secret", rights=(AclEntry("group", 99, 4),))), [("acl", "fail")]),
        (seen(directory(rights=(AclEntry("user", ME, 6), AclEntry("user", 0, 6)))), []),
        (seen(directory(mode=0o2770, gid=GROUP, rights=(AclEntry("group", GROUP, 6),)), **IN_GROUP), []),
        (seen(user=0), [("root", "warn")]),
        (seen(umask=0), [("umask", "fail")]),
        (seen(umask=0, permissions="private"), []),
        (seen(umask=0o002), []),
        (seen(policy_problem="there is no group 'x'"), [("policy", "fail")]),
        (seen(secrets=("monitor.wandb.api_key",)), [("secret-in-config", "fail")]),
        (seen(mount=NFS), []),
        (seen(units=(SystemdUnit("/etc/x", {"User": "a", "NoNewPrivileges": "yes"}),)), []),
        (seen(units=(SystemdUnit("/etc/x", {"NoNewPrivileges": "yes"}),)), [("unit-root", "fail")]),
        (seen(units=(SystemdUnit("/h/.config/systemd/user/s.service", {"NoNewPrivileges": "yes"}),)), []),
        (seen(units=(SystemdUnit("/etc/x", {"User": "a"}),)), [("unit-privileges", "warn")]),
        (
            seen(units=(SystemdUnit("/x", {"User": "a", "NoNewPrivileges": "1", "UMask": "0"}),)),
            [("unit-umask", "fail")],
        ),
    ],
)  # fmt: skip
def test_each_security_rule_finds_its_own_case_only(snapshot, expected):
    assert sorted(found(snapshot)) == sorted(expected)


def test_every_finding_names_a_place_and_nearly_every_one_a_fix():
    snapshot = seen(
        directory(mode=0o777), file("secret", 0o666, uid=9), file("appended", 0o660, links=3), user=0, umask=0,
        mount=NFS, secrets=("a.token",), policy_problem="bad", unread={"/x": "Permission denied"},
        units=(SystemdUnit("/etc/x", {"UMask": "0"}),),
    )  # fmt: skip
    for finding in judge(snapshot):
        assert finding.what
        assert finding.where
        assert finding.mend or finding.name == "unread"


def test_findings_are_sorted_by_severity_and_the_worst_is_the_verdict():
    findings = judge(seen(directory(mode=0o757), mount=NFS))
    assert [finding.severity for finding in findings] == ["fail", "warn", "info", "info", "info"]
    assert verdict(findings) == "fail"
    assert verdict(findings[1:]) == "warn"
    assert verdict(findings[2:]) == "ok"


def test_acl_rights_are_read_without_masked_bits():
    entries = ((0x01, 7, 0), (0x02, 7, 99), (0x04, 5, 0), (0x08, 7, 50), (0x10, 4, 0), (0x20, 0, 0))
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    assert list(rights_in(data, default=False)) == [AclEntry("user", 99, 4), AclEntry("group", 50, 4)]
    for length in range(len(data)):
        list(rights_in(data[:length], default=True))


def test_secret_configuration_keys_are_recognized():
    table = {
        "monitor": {"wandb": {"api_key": "x"}, "kinds": ["jsonl"], "mlflow": {"tracking_uri": "https://u:p@host"}},
        "explorer": {"engine": {"token_env": "KEY", "address": "http://host"}}, "tokenizer": "t", "token": "",
    }  # fmt: skip
    assert list(secret_keys(table)) == ["monitor.wandb.api_key", "monitor.mlflow.tracking_uri"]


def test_settings_of_a_systemd_service_section_are_read():
    text = "[Unit]\nUser=no\n[Service]\n# User=no\nUser = a\nUser=b\nUMask=0022\n[Install]\nUser=no\n"
    assert service_settings(text) == {"User": "b", "UMask": "0022"}


@pytest.fixture
def job(tmp_path):
    made = build(tmp_path / "job")
    os.chmod(made.root, 0o700)
    return made


def test_examining_a_job_changes_nothing(job, tmp_path):
    before = fingerprint(tmp_path)
    report = examine(job.root)
    assert fingerprint(tmp_path) == before
    assert report.verdict in ("ok", "warn")
    roles = {entry.role for entry in collect(job.root).entries}
    assert {"job", "parent", "state", "file", "step"} <= roles


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda job: os.chmod(job.root, 0o777), "world-writable"),
        (lambda job: os.chmod(f"{job.state}/explorers/e0.json", 0o666), "world-writable"),
        (lambda job: os.symlink("/tmp", f"{job.state}/rendezvous"), "link"),
        (lambda job: os.link(f"{job.state}/explorers/e0.json", job.events), "second-name"),
        (lambda job: job.disk.replace(f"{job.root}/config.toml", b'[monitor]\ntoken = "x"\n'), "secret-in-config"),
        (lambda job: job.disk.replace(f"{job.root}/config.toml", b'[job]\npermissions = "x"\n'), "policy"),
        (lambda job: os.mkfifo(f"{job.root}/config.toml"), "policy"),
    ],
)  # fmt: skip
def test_each_weakness_of_a_job_fails_the_examination(job, spoil, name):
    assert name not in {finding.name for finding in examine(job.root).findings}
    spoil(job)
    report = examine(job.root)
    assert name in {finding.name for finding in report.findings if finding.severity == "fail"}
    assert report.verdict == "fail"


def test_an_acl_on_disk_is_found_with_its_fix(job):
    data = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry)
        for entry in (
            (1, 6, 2**32 - 1),
            (2, 6, 4242),
            (4, 4, 2**32 - 1),
            (16, 6, 2**32 - 1),
            (32, 0, 2**32 - 1),
        )
    )
    path = f"{job.state}/explorers/e0.json"
    try:
        os.setxattr(path, "system.posix_acl_access", data)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    (finding,) = [finding for finding in examine(job.root).findings if finding.name == "acl"]
    assert finding.mend == f"setfacl -x user:4242 {path}"


def test_doctor_security_prints_the_documented_json(job, capsys):
    shell = Shell(capsys)
    done = shell("doctor", job.root, "--security", "--json")
    assert done.code == 0
    assert done.document["schema_version"] == 1
    assert set(done.document) == {
        "schema_version", "protocol", "directory", "permissions", "findings", "verdict",
    }  # fmt: skip
    os.chmod(job.state, 0o777)
    done = shell("doctor", job.root, "--security")
    assert done.code == 77
    assert f"-> chmod o-w {job.state}" in done.out
    assert shell("doctor", f"{job.root}/none", "--security").code == 74
    finding = shell("doctor", job.root, "--security", "--json").document["findings"][0]
    assert set(finding) == {"name", "severity", "what", "where", "mend"}
    json.dumps(finding)


def test_a_token_file_that_others_can_read_is_found(job, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("secret-value")
    token.chmod(0o644)
    done = Shell(capsys)("doctor", job.root, "--security", "--token-file", token, "--json")
    assert done.code == 77
    assert "readable-secret" in {finding["name"] for finding in done.document["findings"]}
    assert "secret-value" not in done.out


def test_a_configuration_that_others_can_change_is_reported_and_no_failure(job):
    """Programs refuse the code that it names; the doctor says so."""

    def reported():
        return [finding for finding in examine(job.root).findings if finding.name == "untrusted-config"]

    config = f"{job.root}/config.toml"
    with open(config, "a", encoding="utf-8"):
        pass
    os.chmod(job.root, 0o755)
    os.chmod(config, 0o644)
    assert reported() == []
    os.chmod(config, 0o664)
    (finding,) = reported()
    assert (finding.severity, finding.where) == ("info", config)
    assert "can write to it" in finding.what


def test_a_snapshot_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen().umask = 0  # type: ignore[misc]
