"""explorers-vllm.sbatch and together.sbatch on a real Slurm, as `syncd init` writes them, with fake servers."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the model is made by transformers")

from support.paths import ROOT
from test_slurm_files import bed, in_bed  # noqa: F401 - the fixture

from syncd.cli.main import run

sys.path.insert(0, str(ROOT / "examples" / "arithmetic"))

from tiny_model import make_model

pytestmark = [pytest.mark.group("mounts"), pytest.mark.beds, pytest.mark.slow, pytest.mark.timeout(900)]

SERVER = f"{sys.executable} {ROOT}/tests/programs/fake_vllm.py {{model}} --port {{port}}"
APPLIED = """
import json, sys
found = json.load(sys.stdin)["explorers"]
ready = [one for one in found if one["applied"] == {"generation": 1, "step": 1} and one["status"] == "running"]
sys.exit(len(ready) != 2 or any(one["engine"]["state"] not in ("loaded", "proven") for one in ready))
"""
HEALTH = """
import sys, urllib.request as request
answer = request.build_opener(request.ProxyHandler({})).open(sys.argv[1], timeout=60)
print("healthy" if answer.status == 200 else answer.status)
"""


def starts(place):
    return [line.split() for line in (place / "starts").read_text().splitlines()]


def new_job(place):
    """Write the files of a job with vLLM, and what the script runs beside it."""
    make_model(place / "model", 1)
    assert run(["init", str(place / "new"), "--model", str(place / "model")]) == 0
    (place / "applied.py").write_text(APPLIED)
    (place / "health.py").write_text(HEALTH)


def environment(place):
    return {"SYNCD_SERVER": SERVER, "SYNCD_STAGE": str(place / "stage"), "PLACE": str(place)}


BESIDE = """
cd new
syncd publish job 1 PLACE/model
applied() { syncd status job --json | python PLACE/applied.py; }
started() { (($(wc -l <PLACE/starts) == $1)); }
"""


def explorers_in(place):
    return sorted(path.name for path in Path(place, "new/job/explorers").iterdir())


@pytest.mark.only_with(SYNCD_SLURM="1")
@pytest.mark.parametrize(
    ("array", "names"),
    [
        pytest.param("5 --ntasks-per-node 2", ["5-0", "5-1"], id="two tasks of an element"),
        pytest.param("5-6 --nodelist n0", ["5", "6"], id="two elements on one node"),
    ],
)
def test_servers_of_one_node_have_ports_of_their_own_and_are_started_again(bed, tmp_path, array, names):  # noqa: F811
    new_job(tmp_path)
    said = in_bed(
        bed,
        tmp_path,
        BESIDE.replace("PLACE", str(tmp_path))
        + f"""
syncd watch job --log-level warning & daemon=$!
sbatch --array {array} -o {tmp_path}/out-%a explorers-vllm.sbatch job.toml job
wait_for 200 applied
squeue --noheader --format 'node %N'
python {tmp_path}/health.py $(cat {tmp_path}/out-* | grep -o 'http://127[0-9.:]*/' | head -n 1)
# A server that ends is started again, with its explorer, while the other one goes on.
kill -9 $(head -n 1 {tmp_path}/starts | cut -d' ' -f1)
wait_for 200 started 3
wait_for 200 applied
for element in $(squeue --noheader --array --format %i); do scancel --signal=TERM --batch $element; done
wait_for 100 job_is 1 JobState=COMPLETED
kill $daemon; wait $daemon
syncd status job --json
""",
        limit=600,
        **environment(tmp_path),
    )
    assert "healthy" in said
    assert len({line for line in said.splitlines() if line.startswith("node n")}) == 1, "they share a node"
    found = starts(tmp_path)
    assert len({port for _, port, *_ in found}) == 3, "each start has a port of its own"
    assert {model for *_, model in found} == {f"{tmp_path}/model"}
    assert not any(os.path.exists(f"/proc/{pid}") for pid, *_ in found)
    assert explorers_in(tmp_path) == [f"explorers-vllm-{name}" for name in names]


@pytest.mark.only_with(SYNCD_SLURM="1")
def test_servers_of_a_heterogeneous_job_are_started_again_and_end_with_its_trainer(bed, tmp_path):  # noqa: F811
    """The trainer is a stand-in that waits for the file `gone`; daemon, explorers and stage are real."""
    new_job(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/trainer").write_text(
        f"#!/bin/bash\nuntil [[ -e {tmp_path}/gone ]]; do sleep 0.2; done\n"
    )
    (tmp_path / "bin/trainer").chmod(0o755)
    in_bed(
        bed,
        tmp_path,
        BESIDE.replace("PLACE", str(tmp_path))
        + f"""
# Two tasks for the second component, as its `#SBATCH` line would say.
sed -i '/hetjob/,$ s/--ntasks-per-node=1/--ntasks-per-node=2/' together.sbatch
sbatch together.sbatch job.toml job
wait_for 200 applied
kill -9 $(head -n 1 {tmp_path}/starts | cut -d' ' -f1)
wait_for 200 started 3
wait_for 200 applied
touch {tmp_path}/gone
wait_for 200 job_is 1 JobState=COMPLETED
""",
        limit=600,
        PATH=f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        **environment(tmp_path),
    )
    found = starts(tmp_path)
    assert len({port for _, port, *_ in found}) == 3, "each start has a port of its own"
    assert not any(os.path.exists(f"/proc/{pid}") for pid, *_ in found)
    assert explorers_in(tmp_path) == ["together-0", "together-1"]
