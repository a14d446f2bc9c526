"""What users get: the source distribution is whole; the wheel built from it has programs, types and documentation."""

import importlib.metadata
import re
import shutil
import subprocess
import tarfile

import pytest
from support import installed
from support.doc_pages import anchors, links, message_links
from support.paths import ROOT

from syncd import __version__
from syncd.errors import DOCS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return installed.install(tmp_path_factory.mktemp("release"))


def output(environment, *command):
    program, *arguments = command
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd="/",
    )
    return done.stdout


def test_the_source_distribution_has_every_file_of_the_repository(environment):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to compare with")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (archive,) = environment.parent.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {name for name in tracked.splitlines() if (ROOT / name).exists()} - names == set()


@pytest.mark.parametrize("program", ["syncd", "trainer", "explorer"])
def test_a_program_runs_from_the_wheel(environment, program):
    assert output(environment, program, "--version") == f"{program}, version {__version__}\n"
    assert output(environment, program, "--help").startswith(f"Usage: {program} ")


def test_the_wheel_has_the_pages_that_messages_cite(environment):
    pages = environment / "share" / "doc" / "syncd"
    cited = {
        link for name in ("syncd", "trainer", "explorer_hooks")
        for path in (installed.packages_of(environment) / name).rglob("*.py")
        for link in message_links(path.read_text())
    }  # fmt: skip
    assert len(cited) > 12
    for page, anchor in cited:
        assert not anchor or anchor in anchors(pages / page), (page, anchor)
    for page in pages.rglob("*.md"):
        for link, target, _ in links(page):
            assert target.exists(), (page, link)
    assert f"Without network: {pages}/commands.md" in output(environment, "syncd", "--help")


def test_the_wheel_says_that_its_packages_are_typed(environment):
    assert {path.parent.name for path in installed.packages_of(environment).glob("*/py.typed")} >= {
        "syncd", "trainer", "explorer_hooks",
    }  # fmt: skip


def test_code_of_a_user_runs_with_the_wheel(environment, tmp_path):
    """`make lint` checks that it is typed."""
    program = ROOT / "tests" / "programs" / "typed_user.py"
    assert output(environment, "python", "-P", program, tmp_path) == "done\n"


def test_what_the_package_index_shows_links_to_the_files_of_this_release(environment):
    (found,) = importlib.metadata.distributions(name="syncd", path=[str(installed.packages_of(environment))])
    shown = found.metadata.get_payload()
    targets = set(re.findall(r"\]\(([^)]+)\)", shown))
    assert f"{DOCS}/tutorial-slurm.md" in targets
    assert [target for target in targets if "://" not in target] == []
    assert found.metadata["License-Expression"] == "Apache-2.0"
