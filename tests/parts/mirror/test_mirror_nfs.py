"""A mirror between directories of real NFS: one client writes the source and reads the far job, the other mirrors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.only_with(SYNCD_S3="1"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

TESTS = Path(__file__).resolve().parents[2]
STEPS = 20
SCRIPT = f"""
export PYTHONPATH={TESTS.parent}:{TESTS} PYTHONDONTWRITEBYTECODE=1
mkdir $SRV/job $SRV/far
on_a {sys.executable} -m syncd watch $A/job 2>$OUT/daemon.log & daemon=$!
mirror() {{ on_b exec {sys.executable} -m syncd mirror $B/job $B/far "$@" 2>>$OUT/mirror.log; }}
mirror & killed=$!
on_a {sys.executable} {TESTS}/programs/write_steps.py $A/job 1 {STEPS} 1 --pause 0.5 || exit 1
pkill -KILL -f 'syncd mirror' && wait $killed
mirror --once || exit 2
on_a {sys.executable} -m syncd verify $A/far {STEPS} --deep || exit 3
cd $SRV/job/global_step_{STEPS}
for file in manifest.json actor/*.safetensors; do cmp $file $SRV/far/global_step_{STEPS}/$file || exit 4; done
cmp $SRV/job/latest_state_dict_iteration.txt $SRV/far/latest_state_dict_iteration.txt || exit 5
kill $daemon; pkill -TERM -f 'syncd watch'; wait
"""


def test_a_job_on_nfs_is_mirrored_to_nfs_through_a_kill(nfs_bed, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT)
    kept = {**os.environ, "BED": str(tmp_path / "bed"), "LIMIT": "400"}
    done = subprocess.run([nfs_bed, script], env=kept, capture_output=True, text=True, check=False)
    logs = [path.read_text()[-3000:] for path in sorted((tmp_path / "bed" / "out").glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout[-3000:], *logs])
    assert sum(log.count("mirror_version_published") for log in logs) >= 2
