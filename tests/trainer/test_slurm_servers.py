"""explorers-vllm.sbatch on a real Slurm, with the files that `syncd init` writes and fake servers."""

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


@pytest.mark.only_with(SYNCD_SLURM="1")
def test_a_task_is_a_server_with_an_explorer_that_is_started_again_and_leaves(bed, tmp_path):  # noqa: F811
    make_model(tmp_path / "model", 1)
    assert run(["init", str(tmp_path / "new"), "--model", str(tmp_path / "model")]) == 0
    (tmp_path / "applied.py").write_text(APPLIED)
    (tmp_path / "health.py").write_text(HEALTH)
    said = in_bed(
        bed,
        tmp_path,
        f"""
cd new
syncd watch job --log-level warning & daemon=$!
syncd publish job 1 {tmp_path}/model
sbatch --array 5 --ntasks-per-node 2 -o {tmp_path}/out explorers-vllm.sbatch job.toml job
applied() {{ syncd status job --json | python {tmp_path}/applied.py; }}
started() {{ (($(wc -l <{tmp_path}/starts) == $1)); }}
wait_for 200 applied
python {tmp_path}/health.py $(grep -o 'http://127[0-9.:]*/' {tmp_path}/out | head -n 1)
# A server that ends is started again, with its explorer, while the other one goes on.
kill -9 $(head -n 1 {tmp_path}/starts | cut -d' ' -f1)
wait_for 200 started 3
wait_for 200 applied
scancel --signal=TERM --batch 1_5
wait_for 100 job_is 1 JobState=COMPLETED
kill $daemon; wait $daemon
syncd status job --json
""",
        limit=600,
        SYNCD_SERVER=SERVER,
        SYNCD_STAGE=str(tmp_path / "stage"),
        PLACE=str(tmp_path),
    )
    assert "healthy" in said
    found = starts(tmp_path)
    assert len({port for _, port, *_ in found}) == 3, "each start has a port of its own"
    assert {model for *_, model in found} == {f"{tmp_path}/model"}
    assert not any(os.path.exists(f"/proc/{pid}") for pid, *_ in found)
    assert sorted(path.name for path in Path(tmp_path, "new/job/explorers").iterdir()) == [
        "explorers-vllm-5-0", "explorers-vllm-5-1",
    ]  # fmt: skip
