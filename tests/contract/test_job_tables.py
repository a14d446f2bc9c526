"""A table that another package adds to the job's file: each program reads and checks it as one of our own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.job_file import job_of, write_job

pytest.importorskip("pydantic", reason="the job's file needs pydantic")

from syncd.errors import ConfigError
from trainer.config.load import load_config

INSTALLED = Path(__file__).parent / "installed"

# In a process of its own: tables are added when the model is imported.
READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
from explorer_hooks.run.load import load_file
from own_tables import OwnSection
from syncd.errors import ConfigError
from syncd.jobfile.model import KEYS, json_schema
from trainer.config.job_config import to_toml
from trainer.config.load import load_config

found = {"keys": [name for name in KEYS.all if ".own." in name], "schema": "OwnSection" in json_schema()}
found["page"] = "How deep it goes." in KEYS.documentation("explorer")
for name, load in (("trainer", load_config), ("explorer", load_file)):
    file = load(sys.argv[2], ["--explorer.own.depth", "5"])
    found[name] = file.explorer.part(OwnSection).depth
    try:
        load(sys.argv[2], ["--explorer.own.deep", "5"])
    except ConfigError as error:
        found[f"{name} refuses"] = f"{error.message}: {error.hint}"
kept = to_toml(load_config(sys.argv[2], ["--explorer.own.depth", "5"]))
found["kept"] = kept.split("[explorer.own]")[1].split()[:3]
print(json.dumps(found))
"""


def test_a_table_of_a_package_that_is_not_installed_is_refused(tmp_path):
    path = write_job(tmp_path / "job.toml", job_of(explorer={"own": {"depth": 5}}))
    with pytest.raises(ConfigError, match=r"explorer\.own, a table that nothing installed reads"):
        load_config(path)


def test_a_table_of_another_package_is_read_checked_documented_and_kept(tmp_path):
    path = write_job(tmp_path / "job.toml", job_of(explorer={"tasks": "tasks.jsonl"}))
    ended = subprocess.run(
        [sys.executable, "-c", READ, str(INSTALLED), path], check=True, capture_output=True, text=True
    )
    refusal = "unknown key explorer.own.deep: did you mean explorer.own.depth?"
    assert json.loads(ended.stdout) == {
        "keys": ["explorer.own.depth"],
        "schema": True,
        "page": True,
        "trainer": 5,
        "explorer": 5,
        "trainer refuses": refusal,
        "explorer refuses": refusal,
        "kept": ["depth", "=", "5"],
    }
