"""No other `trainer` is met: neither a file of the working directory nor a distribution found before ours."""

import configparser
import os
import subprocess
import sys
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.job_file import tiny_job, write_job
from support.paths import PYTHONPATH, ROOT
from support.trainers import write_experiences

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOSTILE = """
with open({seen!r}, "a") as file:
    file.write(f"{{__file__}}\\n")
raise SystemExit(99)
"""


def script(place, name):
    """Write a console script as pip does, by the entry point that setup.cfg has now."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    points = dict(
        line.replace(" ", "").split("=")
        for line in setup["options.entry_points"]["console_scripts"].strip().splitlines()
    )
    module, function = points[name].split(":")
    path = place / name
    path.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    path.chmod(0o755)


@pytest.fixture
def hostile(tmp_path):
    """Return a function that runs a command among files that end every process which imports them."""
    seen, here, site = tmp_path / "seen", tmp_path / "here", tmp_path / "site"
    for directory in (here, site / "trainer", tmp_path / "bin"):
        directory.mkdir(parents=True)
    files = [here / f"{name}.py" for name in ("trainer", "syncd", "explorer_hooks")]
    for file in (*files, site / "trainer" / "__init__.py"):
        file.write_text(HOSTILE.format(seen=str(seen)))
    for name in ("trainer", "syncd"):
        script(tmp_path / "bin", name)
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{site}{os.pathsep}{PYTHONPATH}",
        "OMP_NUM_THREADS": "1",
    }

    def run(*command):
        done = subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, check=False, timeout=400
        )
        met = seen.read_text() if seen.exists() else ""
        seen.unlink(missing_ok=True)
        return done, met

    return run


def new_job(place, name):
    job = place / name
    job.mkdir()
    write_experiences(job, 4)
    write_job(place / f"{name}.toml", tiny_job(job, engine={"device": "cpu"}, trainer={"total_steps": 2}))
    return job


def test_the_files_of_this_test_are_met_where_nothing_prevents_it(hostile):
    done, met = hostile(sys.executable, "-m", "trainer", "--help")
    assert (done.returncode, met.endswith("/here/trainer.py\n")) == (99, True)
    done, met = hostile(sys.executable, "-P", "-m", "trainer", "--help")
    assert (done.returncode, met.endswith("/site/trainer/__init__.py\n")) == (99, True)


def test_a_job_of_several_processes_ends_without_meeting_another_trainer(hostile, tmp_path):
    """Alone and under torchrun, as docs/launch.md has them."""
    programs = os.path.dirname(sys.executable)
    torchrun = [f"{programs}/torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    starts = {"alone": (), "torchrun": torchrun}
    for name, before in starts.items():
        job = new_job(tmp_path, name)
        done, met = hostile(*before, "trainer", "train", f"{tmp_path}/{name}.toml")
        assert (done.returncode, met) == (0, ""), (name, done.stderr[-3000:])
        version = read_version(Job.at(job))
        assert version is not None, "the daemon that rank 0 started has published"
        assert version.step == 2


def test_the_help_of_syncd_lists_the_trainer_s_verb(hostile):
    done, met = hostile("syncd", "--help")
    assert (done.returncode, met) == (0, "")
    assert "probe" in done.stdout


def test_documents_and_help_start_no_rank_by_module_name():
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "trainer/cli/train.py"):
        for word, following in pairwise(path.read_text().split()):
            assert (word, following) != ("-m", "trainer"), f"{path}: torchrun --no-python trainer"


def test_a_replaced_package_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("from trainer.trainer import Trainer\n")
    os.symlink(ROOT / "syncd", tmp_path / "syncd")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from syncd.trainer_program import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 78
    assert "another distribution called trainer has replaced this file" in done.stderr
    assert "hint: pip uninstall trainer" in done.stderr
