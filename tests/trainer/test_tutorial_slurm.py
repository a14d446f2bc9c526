"""docs/tutorial-slurm.md as a newcomer types it, on a real Slurm: a model, a job, one sbatch, its status and end.

`make test-slurm` runs it; of the shipped sbatch files `make test` has test_slurm_files.py.
"""

import os
import re
import sys

import pytest
from support.needed import need

need("verl", "the trainer needs verl")

from support.paths import ROOT  # noqa: E402
from test_slurm_files import bed, in_bed  # noqa: E402, F401

pytestmark = [
    pytest.mark.only_with(SYNCD_SLURM="1"),
    pytest.mark.group("mounts"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

PAGE = ROOT / "docs" / "tutorial-slurm.md"
SHARED = "/shared"


def sections():
    """Return the commands of each section of the page, by its heading."""
    parts = PAGE.read_text().split("\n## ")[1:]
    blocks = {
        part.partition("\n")[0]: re.findall(r"(?m)^ {4}(.*)$", part.partition("```")[0]) for part in parts
    }
    return {heading: lines for heading, lines in blocks.items() if lines}


def commands():
    """Return what is typed on a cluster once the environment is there."""
    found = sections()
    assert list(found) == [
        "What you need",
        "Check the mount",
        "A model",
        "A job",
        "Start it",
        "Watch it",
        "The end",
        "On one machine",
    ]
    return [line for name in list(found)[1:-1] for line in found[name]]


def shown():
    """Return the outputs on the page."""
    return re.findall(r"(?s)```text\n(.*?)```", PAGE.read_text())


def test_the_commands_of_the_page_train_a_model_on_slurm(bed, tmp_path):  # noqa: F811
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={os.path.dirname(sys.executable)}:$PATH\n")
    (tmp_path / "syncd").symlink_to(ROOT)
    script = "\n".join(commands()).replace(SHARED, str(tmp_path))
    said = in_bed(bed, tmp_path, f"{script}\nwait_for 300 job_is 1 JobState=COMPLETED\n", limit=1200)
    (tmp_path / "said").write_text(said)
    assert said.splitlines().count("1.5") == 1
    heads = [line.split()[0] for line in said.replace(str(tmp_path), SHARED).splitlines() if line.strip()]
    for line in filter(None, "".join(shown()).splitlines()):
        assert line.split()[0] in heads, f"the page shows a line that no command prints: {line}"
    assert (tmp_path / "result" / "config.json").is_file()
    assert (tmp_path / "result" / "tokenizer.json").is_file()
