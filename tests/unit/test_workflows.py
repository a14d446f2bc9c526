"""Workflows of the forge: what can be known of them without one."""

import re

import pytest
from support.paths import ROOT

yaml = pytest.importorskip("yaml", reason="workflows are YAML")

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs_of(name):
    return yaml.safe_load((ROOT / ".github/workflows" / name).read_text())["jobs"]


def commands_of(job):
    return [step["run"] for step in job.get("steps", ()) if "run" in step]


def test_each_workflow_parses_and_needs_jobs_that_exist():
    assert [path.name for path in FILES] == ["ci.yml", "pages.yml", "release.yml"]
    for path in FILES:
        jobs = jobs_of(path.name)
        for job in jobs.values():
            needed = job.get("needs", [])
            assert ({needed} if isinstance(needed, str) else set(needed)) <= set(jobs)


def test_commands_of_workflows_name_targets_and_files_that_exist():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for path in FILES:
        for job in jobs_of(path.name).values():
            for command in commands_of(job):
                assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets, command
                assert all((ROOT / name).is_file() for name in re.findall(r"bash (\S+)", command)), command


def test_nothing_is_published_before_the_tests_of_ci_have_passed():
    jobs = jobs_of("release.yml")
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert "workflow_call" in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())[True]


def test_ci_has_the_beds_and_the_history_that_tests_need():
    test = jobs_of("ci.yml")["test"]
    checkout = next(step["with"] for step in test["steps"] if "checkout" in step.get("uses", ""))
    assert checkout["fetch-depth"] == 0
    assert "sudo bash tests/beds/install.sh" in commands_of(test)
    assert 'sudo env "PATH=$PATH" make test' in commands_of(test)
